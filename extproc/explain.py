"""`kvmesh explain`: asks a running picker what it would do with a request, and shows the answer as tables."""

from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from extproc.errors import ConfigError, KvmeshError
from extproc.wire.ext_proc import OBJECTIVE_HEADER


async def ask(
    url: str, *, body: bytes, path: str | None, objective: str | None, timeout_seconds: float
) -> dict[str, Any]:
    """Return the picker's explanation. Raise KvmeshError saying which address did not answer."""
    headers = {OBJECTIVE_HEADER: objective} if objective else {}
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                f"{url.rstrip('/')}/explain",
                data=body,
                headers=headers,
                params={"path": path or _path_of(body)},
            ) as response,
        ):
            if response.status != 200:
                raise KvmeshError(f"{url} answered {response.status}: {(await response.text())[:200]}")
            answer: dict[str, Any] = msgspec.json.decode(await response.read())
            return answer
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is not a URL like http://127.0.0.1:9090") from error
    except (TimeoutError, aiohttp.ClientError) as error:
        raise KvmeshError(f"the picker's admin page at {url} does not answer: {error or 'timed out'}") from error


def _path_of(body: bytes) -> str:
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "/v1/chat/completions"  # the picker says what is wrong with it
    is_completion = isinstance(request, dict) and "prompt" in request and "messages" not in request
    return "/v1/completions" if is_completion else "/v1/chat/completions"


def render(answer: dict[str, Any]) -> None:
    """Print the explanation for a person."""
    console = Console()
    if answer["endpoint"] is None:
        console.print(f"refused with {answer['status']} ({answer['reason']}): {answer['message']}", markup=False)
        return
    fallbacks = ", ".join(answer["fallbacks"]) or "none"
    console.print(f"winner: {answer['endpoint']}   fallbacks: {fallbacks}", markup=False, highlight=False)
    console.print(
        f"prompt: {answer['prompt_tokens']} tokens, {answer['matched_tokens']} expected in the winner's cache",
        highlight=False,
    )
    if answer["degraded"]:
        console.print(f"missing inputs: {', '.join(answer['degraded'])}", markup=False, highlight=False)
    console.print(_candidates_table(answer))


def _candidates_table(answer: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))  # fits a terminal of 80 columns
    table.add_column("\nendpoint", no_wrap=True)
    scorers = list(answer["weights"])
    numbers = ["matched\nblocks", "\nwaiting", "\nrunning", "KV\nuse"]
    for heading in [*numbers, *(f"{name}\n× {answer['weights'][name]:g}" for name in scorers), "\ntotal"]:
        table.add_column(heading, justify="right")
    for candidate in sorted(answer["candidates"], key=lambda candidate: -candidate["total"]):
        booked = candidate["booked_since_report"]
        table.add_row(
            candidate["endpoint"] + _remarks(candidate),
            str(candidate["matched_blocks"]),
            _known(candidate["waiting"]) + (f"+{booked}" if booked else ""),
            _known(candidate["running"]),
            "?" if candidate["kv_usage"] is None else f"{candidate['kv_usage']:.0%}",
            *[f"{candidate['scores'][name]:.2f}" if name in candidate["scores"] else "-" for name in scorers],
            f"{candidate['total']:.2f}",
        )
    for rejected in answer["rejected"]:
        table.add_row(f"{rejected['endpoint']} rejected by {rejected['filter']}")
    return table


def _remarks(candidate: dict[str, Any]) -> str:
    remarks = [candidate["state"]] if candidate["state"] != "ready" else []
    remarks += ["saturated"] if candidate["saturated"] else []
    return f" ({', '.join(remarks)})" if remarks else ""


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)

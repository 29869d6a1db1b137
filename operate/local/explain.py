"""`kvmesh explain`: asks a running picker how it would route a request, and shows the answer as tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.errors import ConfigError, KvmeshError
from extproc.ext_proc.answers import OBJECTIVE_HEADER
from extproc.pages.picker_state import AdmissionState, CandidateState, DecisionState, PickerState
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.bounded_answer import read_within
from kvmesh.plain_text import printable
from operate.local.live_view import fetch_state

FEW_SCORERS = 4
NOT_MEANT = 2  # exit codes
NOT_SERVED = 1
WELL = 0
MOST_NAMED = 10
UNSUPPORTED = "prompt-unsupported"  # degraded input that shows that the body was parsed


async def ask(
    url: str,
    *,
    body: bytes,
    path: str | None,
    objective: str | None,
    timeout_seconds: float,
    pool: str | None = None,
    host: str | None = None,
    login: AdminLogin | None = None,
) -> tuple[DecisionState, bytes]:
    """Return the picker's explanation, and its JSON. Raise KvmeshError if the address does not answer.

    `pool` ("namespace/name") or `host` select one of several pools.
    """
    login = login or AdminLogin()
    headers = ({OBJECTIVE_HEADER: objective} if objective else {}) | login.headers()
    further = ({"pool": pool} if pool else {}) | ({"host": host} if host else {})
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                f"{url.rstrip('/')}/v1/explain",
                data=body,
                headers=headers,
                params={"path": path or _path_of(body)} | further,
                ssl=login.tls(),
                allow_redirects=False,
            ) as response,
        ):
            answer = await read_within(response)
            if response.status != 200:
                words = answer[:200].decode(errors="replace")
                raise KvmeshError(f"{url} answered {response.status}: {printable(words)}")
            return msgspec.json.decode(answer, type=DecisionState), answer
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"--picker {url!r} is not a URL like http://127.0.0.1:9090") from error
    except msgspec.ValidationError as error:
        raise KvmeshError(f"{url} is not a picker's admin page: its answer is no explanation") from error
    except msgspec.DecodeError as error:
        raise KvmeshError(f"{url} is not a picker's admin page: its answer is no JSON") from error
    except (TimeoutError, aiohttp.ClientError) as error:
        raise KvmeshError(f"the picker's admin page at {url} does not answer: {str(error) or 'timed out'}") from error


async def known_there(url: str, *, pool: str | None, login: AdminLogin) -> PickerState | None:
    """Return the picker's state, or None if it cannot be fetched."""
    async with aiohttp.ClientSession() as session:
        found = await fetch_state(session, url.rstrip("/"), pool=pool, login=login)
    return None if isinstance(found, str) else found


def _path_of(body: bytes) -> str:
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "/v1/chat/completions"  # the picker reports the error
    is_completion = isinstance(request, dict) and "prompt" in request and "messages" not in request
    return "/v1/completions" if is_completion else "/v1/chat/completions"


def render(answer: DecisionState, *, console: Console) -> None:
    """Print the explanation as tables. Its content is printed as plain text, never as markup."""
    for line in _facts(answer):
        console.print(Text(printable(line)))
    if answer.candidates:
        console.print(_candidates_table(answer))
    for candidate in answer.candidates:
        if candidate.held_back:
            console.print(Text(printable(f"{candidate.endpoint}: {candidate.held_back}")))
    for rejected in answer.rejected:
        console.print(Text(printable(f"{rejected.endpoint} rejected by {rejected.filter}")))


def _facts(answer: DecisionState) -> Iterator[str]:
    if answer.endpoint is None:
        yield f"refused with {answer.status} ({answer.reason}): {answer.message}"
    else:
        yield f"winner: {answer.endpoint}   fallbacks: {', '.join(answer.fallbacks) or 'none'}"
        yield f"prompt: {answer.prompt_tokens} tokens, {answer.matched_tokens} expected in the winner's cache"
    if answer.request is not None and answer.request.answer_tokens:
        yield f"answer: about {answer.request.answer_tokens:.0f} tokens (± {answer.request.answer_spread or 0.0:.0f})"
    if (prefill := answer.prefill) is not None:
        where = f"remote, by {prefill.endpoint}" if prefill.where == "remote" else "local, by the winner"
        yield f"prefill: {where} ({prefill.rule}: {prefill.why})"
        if prefill.race is not None:
            yield f"race: {'two prefill pods at once' if prefill.races else 'none'} ({prefill.race})"
    if answer.admission is not None and answer.request is not None:
        yield f"class {answer.request.class_name} ({answer.request.class_by}): {_admission(answer.admission)}"
    if answer.degraded:
        yield f"missing inputs: {', '.join(answer.degraded)}"
    for each in answer.shadow:
        yield f"in shadow: would {each.action} ({each.rule}, {each.reason}): {each.words}"
    for note in answer.notes:
        yield f"note: {note}"


def _admission(admission: AdmissionState) -> str:
    verdicts = {"go": "would be sent at once", "wait": "would wait in the queue", "refuse": "would be refused"}
    return (
        f"{verdicts.get(admission.verdict, admission.verdict)}; first token expected after "
        f"{admission.expected_ttft_ms} ms, promised within {admission.target_ttft_ms} ms{_kept(admission)}"
    )


def _kept(admission: AdmissionState) -> str:
    if admission.attainment is None:
        return ""
    return f"; {admission.attainment:.1%} of its class's last {admission.judged:,} judged were within all targets"


def _candidates_table(answer: DecisionState) -> Table:
    """One row per candidate, highest score first. Candidates of a refusal may have no scores."""
    table = Table(box=None, padding=(0, 1, 0, 0))  # fits a terminal of 80 columns
    table.add_column("\nendpoint", no_wrap=True)
    weights = _telling(answer)
    numbers = ["matched\nblocks", "\nwaiting", "\nrunning", "KV\nuse"]
    for heading in [*numbers, *(f"{printable(name)}\n× {weight:g}" for name, weight in weights.items()), "\ntotal"]:
        table.add_column(Text(heading), justify="right")
    for candidate in sorted(answer.candidates, key=lambda candidate: -(candidate.total or 0.0)):
        booked = f"+{candidate.booked_since_report}" if candidate.booked_since_report else ""
        cells = [
            candidate.endpoint + _remarks(candidate),
            str(candidate.matched_blocks),
            _known(candidate.waiting) + booked,
            _known(candidate.running),
            "?" if candidate.kv_usage is None else f"{candidate.kv_usage:.0%}",
            *(_score(candidate.scores.get(name)) for name in weights),
            _score(candidate.total),
        ]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _telling(answer: DecisionState) -> Mapping[str, float]:
    if len(answer.weights) <= FEW_SCORERS:
        return answer.weights

    def differs(name: str) -> bool:
        return len({_score(candidate.scores.get(name)) for candidate in answer.candidates}) > 1

    return {name: weight for name, weight in answer.weights.items() if differs(name)}


def _remarks(candidate: CandidateState) -> str:
    remarks = [candidate.state] if candidate.state != "ready" else []
    remarks += ["full"] if candidate.full else []
    return f" ({', '.join(remarks)})" if remarks else ""


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# --- arguments that are wrong or have no effect -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A warning and the exit code it causes."""

    words: str
    exit_code: int


def doubts(
    answer: DecisionState, there: PickerState, *, objective: str | None, path: str | None, host: str | None
) -> Iterator[Doubt]:
    """Yield the warnings for an answer; `there` is the picker's state, the others are the command's arguments."""
    request = answer.request
    if host is not None and not there.pools:
        yield Doubt(words=f"--for-host {host} tells nothing: this picker has one pool", exit_code=WELL)
    if request is None:
        return
    if objective is not None and request.objective_ignored == "unknown":
        named = _listed([each.name for each in there.classes])
        words = f"--objective {objective!r}: no class and no objective is called so; classes are {named}"
        yield Doubt(words=words, exit_code=NOT_MEANT)
    if objective is not None and request.objective_ignored == "untrusted":
        words = (
            f"the objective {objective} does not count, the request is {request.class_name} ({request.class_by}): "
            "clients may lower themselves, and raise themselves only where the policy says trustObjective"
        )
        yield Doubt(words=words, exit_code=WELL)
    is_read = request.prompts or request.api != "other" or UNSUPPORTED in answer.degraded
    if path is not None and not is_read:
        words = f"--path {path}: bodies of this path are not read, its requests are routed by load alone"
        yield Doubt(words=words, exit_code=WELL)
    yield from _unserved(answer, there)


def _unserved(answer: DecisionState, there: PickerState) -> Iterator[Doubt]:
    request = answer.request
    asked = None if request is None else request.adapter or request.served_model
    if asked is None or not there.endpoints or any(each.models is None for each in there.endpoints):
        return
    served = {name for each in there.endpoints for name in (*(each.models or ()), *(each.adapters or ()))}
    if asked not in served:
        words = f"no pod serves the model {asked!r}, they would answer 404; they serve {_listed(sorted(served))}"
        yield Doubt(words=words, exit_code=NOT_SERVED)


def _listed(names: list[str]) -> str:
    further = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (", ".join(names[:MOST_NAMED]) or "none") + further

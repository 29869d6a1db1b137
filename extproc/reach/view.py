"""`kvmesh policy explain`: gets merged policies from a picker or a folder, and prints them."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.errors import ConfigError, KvmeshError
from extproc.policy.inference_policy import KIND
from extproc.policy.model_tokens import NOT_SEEN
from extproc.policy.resource import explained_spec, resource_text, target_of
from extproc.reach.mesh_policy import MeshPolicy, PolicyTargetError
from extproc.translation.translated import translated_file
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.bounded_answer import read_within
from kvmesh.documents.documents import ClusterAccess, DocumentSource, Snapshot
from kvmesh.documents.sources import FolderSource, kubernetes_source
from kvmesh.plain_text import printable

SEEN = {"folder": "from its folder", "pods": "from its pods", "text": "none in its last prompts, only text"}


async def ask_picker(
    url: str, target: str | None, *, timeout_seconds: float, login: AdminLogin | None = None
) -> dict[str, Any]:
    """Return a running picker's explanation. Raise KvmeshError, whose message names the address."""
    login = login or AdminLogin()
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(
                f"{url.rstrip('/')}/policies",
                params={"target": target} if target else {},
                headers=login.headers(),
                ssl=login.tls(),
                allow_redirects=False,
            ) as response,
        ):
            answer = msgspec.json.decode(await read_within(response))
            if response.status == 404 and isinstance(answer, dict) and "error" in answer:
                raise PolicyTargetError(str(answer["error"]))
            if response.status in {401, 403, 429, 503}:
                error = answer.get("error", "") if isinstance(answer, dict) else ""
                raise KvmeshError(f"{url} answered {response.status}: {printable(str(error)[:400])}")
            if response.status != 200 or not isinstance(answer, dict) or "problems" not in answer:
                raise KvmeshError(f"{url} answered {response.status} without policies: is this a picker with pools?")
            return answer
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"--picker {url!r} is not a URL like http://127.0.0.1:9090") from error
    except msgspec.DecodeError as error:
        raise KvmeshError(f"{url} is not a picker's admin page: its answer is no JSON") from error
    except (TimeoutError, aiohttp.ClientError) as error:
        raise KvmeshError(f"the picker's admin page at {url} does not answer: {str(error) or 'timed out'}") from error


def snapshot_once(
    folder: Path | None, *, program: str, namespaces: Sequence[str] = (), timeout_seconds: float
) -> Snapshot:
    """Return the documents of a folder, or of the cluster of KUBECONFIG. Raise KubernetesConfigError or KvmeshError."""
    files = FolderSource(folder, translate=translated_file) if folder else None
    source = files or kubernetes_source(ClusterAccess(program=program), namespaces=namespaces)
    return asyncio.run(first_snapshot(source, timeout_seconds=timeout_seconds))


async def first_snapshot(source: DocumentSource, *, timeout_seconds: float) -> Snapshot:
    """Return a source's first synced snapshot, and end the source. Raise KvmeshError if none comes in time."""
    found: list[Snapshot] = []
    over = asyncio.Event()

    def keep(snapshot: Snapshot) -> None:
        if snapshot.synced:
            found.append(snapshot)
            over.set()

    running = asyncio.create_task(source.run(keep), name="first-snapshot")
    running.add_done_callback(lambda _: over.set())
    try:
        async with asyncio.timeout(timeout_seconds):
            await over.wait()
    except TimeoutError:
        raise KvmeshError(f"the documents were not all read within {timeout_seconds:g} s") from None
    finally:
        running.cancel()
        await asyncio.wait({running})
    if not found:
        await running  # raises the error that ended it, if any
        raise KvmeshError("the source of the documents has ended before all were read")
    return found[0]


def explain_snapshot(snapshot: Snapshot, target: str | None, *, root_namespace: str, now: datetime) -> dict[str, Any]:
    """Return a picker's explanation of these documents. Raise PolicyTargetError."""
    mesh = MeshPolicy(root_namespace=root_namespace)
    mesh.update(snapshot, now=now)
    return mesh.explain(target)


def is_all_in_force(answer: Mapping[str, Any]) -> bool:
    """Tell whether an explanation shows nothing to fix."""
    pools = answer["pools"]
    accepted = all(policy["accepted"] for pool in pools for policy in pool["policies"])
    return accepted and not answer["problems"] and not any(pool["not_in_force"] for pool in pools)


# --- for people -------------------------------------------------------------------------------------------------------


def render(answer: Mapping[str, Any], *, console: Console) -> None:
    """Print an explanation by pool, each field with its origin. All values are printed as text, never as markup."""
    for pool in answer["pools"]:
        for line in _pool_lines(pool):
            console.print(Text(printable(line)))
        console.print(_fields_table(pool["fields"]) if pool["fields"] else Text("no policy says anything: defaults"))
        for fault in pool["not_in_force"]:
            console.print(Text(printable(f"NOT IN FORCE {fault['policy']}: {fault['because']}")))
        for warning in pool["warnings"]:
            console.print(Text(printable(f"warning: {warning}")))
        for line in _token_lines(pool):
            console.print(Text(printable(line)))
        console.print()
    if not answer["pools"]:
        console.print(Text("this leads to no pool"))
    _print_problems(answer["problems"], console)


def resources_of(answer: Mapping[str, Any]) -> str:
    """Return each pool's merged policy as a custom resource for that pool alone, ready to paste."""
    return "---\n".join(_resource_of(pool) for pool in answer["pools"])


def _resource_of(pool: Mapping[str, Any]) -> str:
    namespace, _, name = pool["pool"].rpartition("/")
    spec, words = explained_spec(pool["fields"])
    refs = target_of(pool["kind"], name)
    sources = ", ".join(policy["policy"] for policy in pool["policies"]) or "no policy: all is default"
    return resource_text(
        {"targetRefs": refs, **spec} if refs else spec,
        name=name or "policy",
        namespace=namespace,
        head=[
            f"What holds at {pool['kind']} {pool['pool']}, merged of {sources}",
            *(f"not in force: {fault['policy']}: {fault['because']}" for fault in pool["not_in_force"]),
        ],
        words=words,
    )


def render_overview(answer: Mapping[str, Any], *, console: Console) -> None:
    """Print one line per pool, and one per policy and condition."""
    console.print(
        _table(
            ("POOL", "ENDPOINTS", "TOKENS", "POLICIES, THE STRONGEST LAST"),
            [
                (
                    *(pool["pool"], f"{pool['ready_endpoints']}/{pool['endpoints']}"),
                    *(_tokens_in_short(pool), _names(pool["policies"])),
                )
                for pool in answer["pools"]
            ],
        )
    )
    console.print()
    rows = [
        (policy["policy"], condition["type"], condition["status"], condition["message"])
        for policy in answer["policies"]
        for condition in policy["conditions"]
    ]
    console.print(_table(("POLICY", "CONDITION", "STATUS", "MESSAGE"), rows))
    shown = {f"{KIND} {policy['policy']}" for policy in answer["policies"]}
    _print_problems([problem for problem in answer["problems"] if problem["where"] not in shown], console)


def _print_problems(problems: Iterable[Mapping[str, str]], console: Console) -> None:
    for problem in problems:
        console.print(Text(printable(f"problem: {problem['where']}: {problem['words']}")))


def _pool_lines(pool: Mapping[str, Any]) -> Iterator[str]:
    hosts = f", hosts {', '.join(pool['hosts'])}" if pool["hosts"] else ""
    yield f"{pool['kind']} {pool['pool']}: {pool['ready_endpoints']} of {pool['endpoints']} endpoints ready{hosts}"
    for policy in pool["policies"]:
        refused = "" if policy["accepted"] else f" REFUSED: {policy['message']}"
        generation = f" (generation {policy['generation']})" if policy["generation"] else ""
        yield f"  {policy['level']:<9} {policy['policy']}{generation}{refused}"


def _tokens_in_short(pool: Mapping[str, Any]) -> str:
    models = pool.get("tokens")
    if models is None:
        return "-"
    wrong = [each for each in models if each["reason"] not in ("", NOT_SEEN)]
    unseen = [each for each in models if each["reason"] == NOT_SEEN]
    worst, word = (wrong, wrong[0]["reason"].upper()) if wrong else (unseen, "unverified")
    if not worst:
        return "known" if models else "unverified"
    return word if len(worst) == len(models) else f"{word} ({len(worst)} of {len(models)} models)"


def _token_lines(pool: Mapping[str, Any]) -> Iterator[str]:
    """Yield the token source of each model; a picker of an earlier release reports none."""
    models = pool.get("tokens")
    if models == []:
        yield "tokens: unverified: no model of it is known here; a running picker learns them from the pods"
    for each in models or ():
        if each["reason"] not in ("", NOT_SEEN):
            yield f"WARNING {each['reason']}: {each['message']}"
        elif each["reason"]:
            yield f"tokens of {each['model']}: unverified: {each['message']}"
        else:
            yield f"tokens of {each['model']}: {SEEN.get(each['seen'], each['seen'])}"


def _fields_table(fields: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[tuple[str, ...]] = []
    for field in fields:
        value = "(taken out)" if field["value"] is None else _value(field["value"])
        rows.append((field["path"].removeprefix("spec."), value, field["policy"], field["level"]))
        rows.extend(("", f"  over {_value(lost['value'])}", lost["policy"], lost["level"]) for lost in field["over"])
    return _table(("FIELD", "VALUE", "FROM", "LEVEL"), rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _names(policies: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(policy["policy"] for policy in policies) or "none: defaults"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()

"""The terminal page of `kvmesh up` and `kvmesh top` (pods, latest decisions), and the fetch of its state.

Content from clients and pods is printed as plain text, never as markup.
"""

import asyncio
import textwrap
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, tzinfo

import aiohttp
import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from extproc.pages.picker_state import ClassState, DecisionState, EndpointState, PickerState, PoolState
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.bounded_answer import read_within
from kvmesh.errors import SettingError
from kvmesh.plain_text import cut_end, cut_start, printable
from operate.local.top_totals import lines, totals_of

FETCH_SECONDS = 2.0
STATE_STYLES = {"ready": "green", "unknown": "yellow", "unreachable": "red"}
REMOTE = "remote"  # value of `prefill.where` if another pod computes the prompt
ALL_ROLES = "both"  # role of a pod without a prefill/decode label
WIDEST_ROLE = 9  # width of the role column, which is hidden if all pods are `both`
HEADINGS = ("state", "blocks", "run", "wait", "KV", "hits", "picks")
WIDEST_NUMBERS = 54  # greatest width of all columns but the address
LEAST_DECISIONS = 4
LEAST_JUDGED = 20  # judged requests before a class can count as missing its SLO
MOST_DECISIONS = 12
OTHER_LINES = 3  # two headings and the last line
PATH_LIMIT = 60
INDENT = " " * 9  # aligned after the clock
REASON_LINES = 2


async def fetch_state(
    session: aiohttp.ClientSession, admin_url: str, *, pool: str | None = None, login: AdminLogin | None = None
) -> PickerState | str:
    """Return the picker's current state, or an error message."""
    login = login or AdminLogin()
    try:
        headers, tls = login.headers(), login.tls()  # read each time: secret files are rotated
        parameters = {"pool": pool} if pool is not None else {}
        async with (
            asyncio.timeout(FETCH_SECONDS),
            session.get(
                f"{admin_url}/state", params=parameters, headers=headers, ssl=tls, allow_redirects=False
            ) as response,
        ):
            content = await read_within(response)
            if response.status != 200:
                words = error_words(content)
                return f"GET {admin_url}/state: status {response.status}{f': {words}' if words else ''}"
            return msgspec.json.decode(content, type=PickerState)
    except TimeoutError:
        return f"GET {admin_url}/state: no answer in {FETCH_SECONDS:g} s"
    except SettingError as error:
        return str(error)
    except (aiohttp.ClientError, msgspec.MsgspecError, OSError, ValueError) as error:
        return f"GET {admin_url}/state: {error}"


class _Problem(msgspec.Struct):
    error: str


def error_words(content: bytes) -> str:
    """Return the message of an error response, or "" if it has none."""
    try:
        return printable(msgspec.json.decode(content, type=_Problem).error[:600])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def local_zone() -> tzinfo | None:
    """Return the local time zone."""
    return datetime.now(UTC).astimezone().tzinfo


def page(
    state: PickerState,
    *,
    zone: tzinfo | None,
    width: int,
    height: int,
    lines_above: int,
    closing: str,
    earlier: PickerState | None = None,
) -> Group:
    """Return a page of at most `height` lines that leaves `lines_above` earlier lines visible if they fit.

    `closing` says how to quit; `earlier` is an older state, from which rates are computed.
    """
    if state.pool is None:
        return _pools_page(state.pools, height=height, closing=closing)
    totals = totals_of(state.endpoints) if len(state.endpoints) > 1 else None
    below_pods = lines(state, earlier, width=width)
    under_pressure = _under_pressure(state.classes)
    height -= len(under_pressure) + len(below_pods) + (totals is not None)
    blocks = [_decision(decision, zone=zone, width=width) for decision in state.decisions[:MOST_DECISIONS]]
    least = sum(map(len, blocks[:LEAST_DECISIONS])) or 1
    shown_pods = _fitting_pods(len(state.endpoints), room=height - OTHER_LINES - least)
    pod_lines = min(shown_pods + 1, len(state.endpoints))
    room = height - OTHER_LINES - pod_lines
    beside_what_is_above = room - lines_above
    decisions = _fitting(blocks, room=beside_what_is_above if beside_what_is_above >= least else room)
    return Group(
        _pods_table(state.endpoints[:shown_pods], totals=totals, width=width),
        *_pods_left_out(state.endpoints[shown_pods:]),
        *map(_line, below_pods),
        *under_pressure,
        _line("last decisions: tokens found in the cache, and why", style="bold"),
        *(decisions or [_line("none yet", style="dim")]),
        _last_line(state, closing=closing),
    )


def decision_line(decision: DecisionState, *, zone: tzinfo | None) -> str:
    """Return a decision as one line of plain text."""
    parts = [_clock(decision.at, zone=zone), _path(decision), "->", _where(decision), _matched(decision)]
    parts += [decision.why] if decision.why else decision.reasons
    parts += [f"degraded={reason}" for reason in decision.degraded]
    return printable(" ".join(parts))


def _fitting_pods(count: int, *, room: int) -> int:
    """Return how many pods to show; if not all fit, one line stays free for the count of the others."""
    return count if count <= room else max(room - 1, 1)


def _fitting(blocks: Sequence[Sequence[Text]], *, room: int) -> list[Text]:
    lines: list[Text] = []
    for block in blocks:
        if len(lines) + len(block) > room:
            break
        lines += block
    return lines


def _pods_table(endpoints: Sequence[EndpointState], *, totals: EndpointState | None, width: int) -> Table:
    have_roles = any(endpoint.role != ALL_ROLES for endpoint in endpoints)
    limit = max(width - WIDEST_NUMBERS - (WIDEST_ROLE if have_roles else 0), 15)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("pod", no_wrap=True, min_width=15)
    for heading in (*(["role"] if have_roles else []), *HEADINGS):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("role", "state") else "right")
    for endpoint in (*endpoints, *([totals] if totals is not None else [])):
        table.add_row(
            Text(cut_start(printable(endpoint.address), limit=limit)),
            *([Text(printable(endpoint.role))] if have_roles else []),
            Text(printable(endpoint.state), style=STATE_STYLES.get(endpoint.state, "")),
            f"{endpoint.cached_blocks:,}",
            _count(endpoint.running),
            _count(endpoint.waiting),
            _share(endpoint.kv_usage),
            _share(endpoint.hit_rate),
            f"{endpoint.picks:,} {endpoint.share:>4.0%}",
            style="bold" if endpoint is totals else "",
        )
    return table


def _pods_left_out(endpoints: Sequence[EndpointState]) -> list[Text]:
    if not endpoints:
        return []
    trouble = sum(endpoint.state != "ready" for endpoint in endpoints)
    return [_line(f"and {len(endpoints)} more, {trouble} of them not ready", style="red" if trouble else "dim")]


def _decision(decision: DecisionState, *, zone: tzinfo | None, width: int) -> list[Text]:
    head = f"{_clock(decision.at, zone=zone)} {_matched(decision):>9}  {_where(decision)}  {_path(decision)}"
    reasons = textwrap.wrap(
        printable(decision.why or ", ".join(decision.reasons)),
        width=max(width, 40),
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        max_lines=REASON_LINES,
        placeholder="…",
        break_on_hyphens=False,
    )
    missing = [f"{INDENT}degraded: {printable(', '.join(decision.degraded))}"] if decision.degraded else []
    return [
        _line(head, style="" if decision.endpoint else "red"),
        *(_line(reason, style="dim") for reason in reasons),
        *(_line(line, style="yellow") for line in missing),
    ]


def _under_pressure(classes: Iterable[ClassState]) -> list[Text]:
    words = [
        f"{printable(each.name)} {each.waiting:,} waiting"
        + (" for the first pod" if each.waiting_for_pod else "")
        + "".join(f", {printable(step)}" for step in each.steps)
        + (f", {each.attainment:.1%} within its targets" if each.attainment is not None else "")
        for each in classes
        if each.waiting or each.steps or _misses(each)
    ]
    return [_line("under pressure: " + "; ".join(words), style="yellow")] if words else []


def _misses(each: ClassState) -> bool:
    if each.attainment is None or each.objective is None or each.judged < LEAST_JUDGED:
        return False
    return each.attainment < each.objective


def _pools_page(pools: Sequence[PoolState], *, height: int, closing: str) -> Group:
    shown = pools[: max(height - OTHER_LINES, 1)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("pool", no_wrap=True)
    for heading in ("ready", "open", "waiting"):
        table.add_column(heading, no_wrap=True, justify="right")
    for pool in shown:
        table.add_row(
            Text(printable(pool.pool)),
            Text(f"{pool.ready}/{pool.endpoints}", style="" if pool.ready == pool.endpoints else "yellow"),
            f"{pool.open_requests:,}",
            f"{pool.waiting:,}",
        )
    left_out = len(pools) - len(shown)
    return Group(
        table,
        *([_line(f"and {left_out} more", style="dim")] if left_out else []),
        _line(f"--pool NAMESPACE/NAME shows one of them    {closing}", style="dim"),
    )


def _last_line(state: PickerState, *, closing: str) -> Text:
    index = f"prefix index: {printable(state.index.state)}, {state.index.sources} sources"
    shadow = "    in shadow: only counts" if state.shadow else ""
    return _line(f"{index}{shadow}    {closing}", style="dim" if state.index.state == "ok" else "yellow")


def _line(text: str, *, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _where(decision: DecisionState) -> str:
    if not decision.endpoint:
        return str(decision.status)
    plan = decision.prefill
    by_another = f", prompt by {printable(plan.endpoint)}" if plan is not None and plan.where == REMOTE else ""
    return printable(decision.endpoint) + by_another


def _path(decision: DecisionState) -> str:
    """Strip the query, which may hold a secret."""
    return cut_end(printable((decision.path or "-").partition("?")[0]), limit=PATH_LIMIT)


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _matched(decision: DecisionState) -> str:
    return f"{decision.matched_tokens}/{decision.prompt_tokens}"


def _clock(unix_seconds: float, *, zone: tzinfo | None) -> str:
    try:
        return datetime.fromtimestamp(unix_seconds, zone).strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "--:--:--"

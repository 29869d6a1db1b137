"""The terminal view of `kvmesh up`: pods and the last decisions, or plain lines where there is no terminal.

Called by `command` once all is ready; reads the picker's admin page and changes nothing. Rendering is pure.
"""

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, tzinfo

import aiohttp
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from extproc.local.picker_state import DecisionState, EndpointState, PickerState, fetch_state

REFRESH_SECONDS = 0.5
SHOWN_DECISIONS = 8  # the addresses and commands above stay on the screen
STATE_STYLES = {"ready": "green", "unknown": "yellow", "unreachable": "red"}


async def show_live(admin_url: str, *, console: Console) -> None:
    """Show the state until cancelled."""
    zone = datetime.now(UTC).astimezone().tzinfo
    async with aiohttp.ClientSession() as session:
        if console.is_terminal:
            await _redraw(session, admin_url, console=console, zone=zone)
        else:
            await _print_lines(session, admin_url, console=console, zone=zone)


async def _redraw(session: aiohttp.ClientSession, admin_url: str, *, console: Console, zone: tzinfo | None) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(render(await fetch_state(session, admin_url), zone=zone), refresh=True)
            await asyncio.sleep(REFRESH_SECONDS)


async def _print_lines(
    session: aiohttp.ClientSession, admin_url: str, *, console: Console, zone: tzinfo | None
) -> None:
    seen_until = 0.0
    last_problem = ""
    while True:
        state = await fetch_state(session, admin_url)
        if isinstance(state, PickerState):
            fresh = new_decisions(state.decisions, after=seen_until)
            for decision in fresh:
                console.print(decision_line(decision, zone=zone), markup=False, highlight=False, soft_wrap=True)
                seen_until = decision.at
            last_problem = ""
        elif state != last_problem:
            console.print(state, markup=False, highlight=False, soft_wrap=True)
            last_problem = state
        await asyncio.sleep(REFRESH_SECONDS)


def new_decisions(decisions: Iterable[DecisionState], *, after: float) -> list[DecisionState]:
    """The decisions made after that Unix time, oldest first."""
    return sorted((decision for decision in decisions if decision.at > after), key=lambda decision: decision.at)


def render(state: PickerState | str, *, zone: tzinfo | None) -> Group | Text:
    """The whole view, or the line that says why there is none."""
    if isinstance(state, str):
        return Text(state, style="red")
    index = f"prefix index: {state.index.state}, {state.index.sources} sources"
    return Group(
        _pods_table(state.endpoints),
        _decisions_table(state.decisions[:SHOWN_DECISIONS], zone=zone),
        Text(f"{index}    Ctrl-C ends everything", style="dim" if state.index.state == "ok" else "yellow"),
    )


def decision_line(decision: DecisionState, *, zone: tzinfo | None) -> str:
    """One decision as one plain line."""
    parts = [_clock(decision.at, zone=zone), decision.path or "-", "->", decision.endpoint or str(decision.status)]
    parts.append(_matched(decision))
    parts += decision.reasons
    parts += [f"degraded={reason}" for reason in decision.degraded]
    return " ".join(parts)


def _pods_table(endpoints: Iterable[EndpointState]) -> Table:
    table = Table(title="pods", title_justify="left", expand=True)
    table.add_column("endpoint", no_wrap=True)
    table.add_column("state")
    for heading in ("cached blocks", "running", "waiting", "KV in use", "hit rate", "share of picks"):
        table.add_column(heading, justify="right")
    for endpoint in endpoints:
        table.add_row(
            endpoint.address,
            Text(endpoint.state, style=STATE_STYLES.get(endpoint.state, "")),
            f"{endpoint.cached_blocks:,}",
            _count(endpoint.running),
            _count(endpoint.waiting),
            _share(endpoint.kv_usage),
            _share(endpoint.hit_rate),
            f"{endpoint.share:.0%} ({endpoint.picks})",
        )
    return table


def _decisions_table(decisions: Iterable[DecisionState], *, zone: tzinfo | None) -> Table:
    table = Table(title="last decisions", title_justify="left", expand=True)
    table.add_column("time", no_wrap=True)
    table.add_column("path", no_wrap=True)
    table.add_column("endpoint", no_wrap=True)
    table.add_column("tokens matched", justify="right")
    table.add_column("reasons", ratio=1, no_wrap=True, overflow="ellipsis")
    for decision in decisions:
        reasons = Text(", ".join(decision.reasons))
        if decision.degraded:
            reasons.append(f" degraded: {', '.join(decision.degraded)}", style="yellow")
        where = decision.endpoint or Text(str(decision.status), style="red")
        table.add_row(_clock(decision.at, zone=zone), decision.path or "-", where, _matched(decision), reasons)
    return table


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _matched(decision: DecisionState) -> str:
    return f"{decision.matched_tokens}/{decision.prompt_tokens}"


def _clock(unix_seconds: float, *, zone: tzinfo | None) -> str:
    return datetime.fromtimestamp(unix_seconds, zone).strftime("%H:%M:%S")

"""The live view of `kvmesh top` and `kvmesh up`, from the admin pages of one or more replicas. Read-only.

Counts of each replica's own (picks, in-flight, queued requests) are summed. For pods and index, which all replicas
see, the latest answer counts, and the worst state if they differ. An unreachable replica keeps its last answer, is
shown with its age, and is retried.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import tzinfo
from io import TextIOWrapper
from typing import Any, TextIO, TypeVar

import aiohttp
import msgspec
from msgspec.structs import replace
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from extproc.pages.picker_state import ClassState, DecisionState, EndpointState, PickerState
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.output.forms import WIDE_ENOUGH, OutputForm, in_form, print_data
from kvmesh.plain_text import printable
from operate.local.greeting import lines_on_screen
from operate.local.live_view import decision_line, fetch_state, local_zone, page
from operate.local.top_totals import Seen
from operate.local.unread_terminal import standard_output

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
MOST_DECISIONS = 50
# the worst first
_ENDPOINT_STATES = ("unreachable", "not-ready", "terminating", "unknown", "ready")
_INDEX_STATES = ("unavailable", "unknown", "stale", "ok")
SORT_COLUMNS: Mapping[str, Callable[[EndpointState], float | None]] = {
    "blocks": lambda pod: pod.cached_blocks,
    "run": lambda pod: pod.running,
    "wait": lambda pod: pod.waiting,
    "kv": lambda pod: pod.kv_usage,
    "hits": lambda pod: pod.hit_rate,
    "picks": lambda pod: pod.picks,
}

T = TypeVar("T")


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica and its last answer; times are monotonic seconds."""

    url: str
    state: PickerState | None = None  # None before the first answer
    heard_at: float | None = None
    problem: str | None = None  # error of the last attempt, or None

    def line(self, *, now: float) -> str:
        """Return its connection status as a line."""
        if self.problem is None:
            return f"{self.url}: " + ("connected" if self.state is not None else "not asked yet")
        if self.heard_at is None:
            return f"{self.url}: not heard yet, trying again: {self.problem}"
        return f"{self.url}: lost for {now - self.heard_at:.0f} s, trying again: {self.problem}"


Show = Callable[[Sequence[Replica], PickerState | None, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The options of the view, which differ between `top` and `up`."""

    title: str = "kvmesh top"  # precedes the number of replicas; "" hides the line
    closing: str = "Ctrl-C leaves"
    above: Sequence[Text] = ()  # earlier output, kept visible if the terminal is tall enough
    is_full_screen: bool = True
    sort_by: str | None = None


def added_up(replicas: Iterable[Replica]) -> PickerState | None:
    """Merge the replicas' last states (lost replicas included), or return None if none has answered."""
    heard = sorted(replicas, key=lambda replica: -(replica.heard_at or 0.0))
    states = [replica.state for replica in heard if replica.state is not None]
    if len(states) <= 1:
        return states[0] if states else None
    newest = states[0]
    # from the connected replica with the highest count: histograms with different start times cannot be added
    connected = (r.state.ttft for r in heard if r.state is not None and r.problem is None)
    measured = max(connected, key=lambda ttft: sum(ttft.counts), default=newest.ttft)
    endpoints = _groups((each for state in states for each in state.endpoints), lambda each: each.address)
    all_picks = sum(each.picks for same in endpoints for each in same)
    decisions = [decision for state in states for decision in state.decisions]
    return replace(
        newest,
        now=max(state.now for state in states),
        endpoints=tuple(_endpoint(same, all_picks=all_picks) for same in endpoints),
        index=replace(newest.index, state=_worst((state.index.state for state in states), _INDEX_STATES)),
        decisions=tuple(sorted(decisions, key=lambda decision: -decision.at)[:MOST_DECISIONS]),
        ttft=measured,
        classes=tuple(
            replace(
                same[0],
                waiting=sum(each.waiting for each in same),
                waiting_for_pod=sum(each.waiting_for_pod for each in same),
                routed=sum(each.routed for each in same),
                judged=sum(each.judged for each in same),
                attainment=_attainment(same),
                steps=tuple(dict.fromkeys(step for each in same for step in each.steps)),
            )
            for same in _groups((each for state in states for each in state.classes), lambda each: each.name)
        ),
        pools=tuple(
            replace(
                same[0],
                open_requests=sum(each.open_requests for each in same),
                waiting=sum(each.waiting for each in same),
            )
            for same in _groups((each for state in states for each in state.pools), lambda each: each.pool)
        ),
    )


def _endpoint(same: Sequence[EndpointState], *, all_picks: int) -> EndpointState:
    picks = sum(each.picks for each in same)
    return replace(
        next((each for each in same if each.running is not None), same[0]),
        state=_worst((each.state for each in same), _ENDPOINT_STATES),
        cached_blocks=same[0].cached_blocks,
        bookings=sum(each.bookings for each in same),
        picks=picks,
        share=picks / all_picks if all_picks else 0.0,
    )


def _attainment(same: Sequence[ClassState]) -> float | None:
    judged = sum(each.judged for each in same)
    return sum(each.judged * (each.attainment or 0.0) for each in same) / judged if judged else None


def _groups(lines: Iterable[T], name_of: Callable[[T], str]) -> Collection[Sequence[T]]:
    groups: dict[str, list[T]] = {}
    for line in lines:
        groups.setdefault(name_of(line), []).append(line)
    return groups.values()


def _worst(states: Iterable[str], worst_first: Sequence[str]) -> str:
    return min(states, key=lambda state: worst_first.index(state) if state in worst_first else 0)


async def look_once(urls: Sequence[str], *, pool: str | None, login: AdminLogin) -> list[Replica]:
    """Ask each replica once."""
    async with aiohttp.ClientSession() as session:
        return list(await asyncio.gather(*(_asked(session, Replica(url=url), pool, login) for url in urls)))


async def follow(urls: Sequence[str], *, pool: str | None, login: AdminLogin, show: Show) -> None:
    """Poll all replicas once a second, independently, and show their states until cancelled."""
    replicas = {url: Replica(url=url) for url in urls}

    async def ask(url: str, session: aiohttp.ClientSession) -> None:
        while True:
            replicas[url] = await _asked(session, replicas[url], pool, login)
            changed.set()
            await asyncio.sleep(REFRESH_SECONDS)

    changed = asyncio.Event()
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for url in urls:
            tasks.create_task(ask(url, session), name=f"ask {url}")
        while True:
            await changed.wait()
            changed.clear()
            known = list(replicas.values())
            show(known, added_up(known), time.monotonic())


async def show_live(urls: Sequence[str], *, pool: str | None, login: AdminLogin, console: Console, look: Look) -> None:
    """Show the replicas' states until cancelled: as a page on a terminal, else as lines."""
    zone = local_zone()
    if not console.is_terminal or console.is_dumb_terminal:
        await follow(urls, pool=pool, login=login, show=show_lines(console, zone=zone))
        return
    with Live(console=console, auto_refresh=False, screen=look.is_full_screen) as live:
        await follow(urls, pool=pool, login=login, show=show_pages(live, look, zone=zone))


def show_pages(live: Live, look: Look, *, zone: tzinfo | None) -> Show:
    """Return a Show that redraws the page for each state."""
    seen = Seen()

    def draw(replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        answering = [replica.url for replica in replicas if replica.problem is None and replica.state is not None]
        earlier = seen.before(state, answering=answering) if state is not None else None
        width, height = live.console.size
        shown = top_page(replicas, state, look, now=now, zone=zone, width=width, height=height, earlier=earlier)
        live.update(shown, refresh=True)

    return guarded(draw, tell=lambda problem: live.update(_line(problem, style="red"), refresh=True))


def guarded(show: Show, *, tell: Callable[[str], None]) -> Show:
    """Wrap `show` so that it never raises: errors are logged and reported as a line by `tell`."""
    last_problem = ""

    def draw(replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        nonlocal last_problem
        try:
            show(replicas, state, now)
        except Exception as error:
            problem = f"the state cannot be shown: {type(error).__name__}: {printable(str(error))}"
            if problem != last_problem:  # log each error only once
                log.warning("the live view cannot be drawn", exc_info=error)
            last_problem = problem
            with suppress(Exception):
                tell(problem)
        else:
            last_problem = ""

    return draw


def sorted_pods(pods: Sequence[EndpointState], sort_by: str | None) -> Sequence[EndpointState]:
    """Sort by a column of SORT_COLUMNS, highest first, unknown values last; None keeps the configured order."""
    if sort_by is None:
        return pods
    value = SORT_COLUMNS[sort_by]
    return sorted(pods, key=lambda pod: (value(pod) is None, -(value(pod) or 0.0)))


def show_lines(console: Console, *, zone: tzinfo | None) -> Show:
    """Return a Show for pipes and logs: prints each decision once, and each change of a replica's status."""
    problems: dict[str, str | None] = {}
    seen_until = 0.0

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def draw(replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        nonlocal seen_until
        for replica in replicas:
            if replica.problem != problems.get(replica.url):
                problems[replica.url] = replica.problem
                tell(printable(replica.line(now=now)))
        for decision in new_decisions(state.decisions if state is not None else (), after=seen_until):
            seen_until = decision.at
            tell(decision_line(decision, zone=zone))

    return guarded(draw, tell=tell)


def new_decisions(decisions: Iterable[DecisionState], *, after: float) -> list[DecisionState]:
    """Return the decisions after that Unix time, oldest first."""
    return sorted((decision for decision in decisions if decision.at > after), key=lambda decision: decision.at)


def show_data(console: Console, form: OutputForm) -> Show:
    """Return a Show that prints JSON lines or YAML documents."""

    def draw(replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        known = as_data(replicas, state, now=now)
        text = msgspec.json.encode(known).decode() if form is OutputForm.JSON else f"---\n{in_form(known, form)}"
        console.out(text, highlight=False)

    return draw


def top_page(
    replicas: Sequence[Replica],
    state: PickerState | None,
    look: Look,
    *,
    now: float,
    zone: tzinfo | None,
    width: int,
    height: int,
    earlier: PickerState | None = None,
) -> Group:
    """Return at most `height` lines: the count of connected replicas, a line for each lost one, and the page.

    `earlier` is an older state, from which rates are computed.
    """
    lost = [replica for replica in replicas if replica.problem is not None]
    connected = sum(replica.problem is None and replica.state is not None for replica in replicas)
    above = []
    if look.title:
        above.append(_line(f"{look.title}    {connected} of {len(replicas)} replicas connected", style="bold"))
    room = max(height // 3, 1)
    for replica in lost if len(lost) <= room else lost[: room - 1]:
        above.append(_line(printable(replica.line(now=now)), style="red"))
    if len(lost) > room:
        above.append(_line(f"and {len(lost) - room + 1} more are lost", style="red"))
    if state is None:
        return Group(*above)
    if not connected:
        above.append(_line("what is shown below is old", style="red"))
    body = page(
        replace(state, endpoints=sorted_pods(state.endpoints, look.sort_by)),
        zone=zone,
        width=width,
        height=height - len(above),
        lines_above=lines_on_screen(look.above, width=width),
        closing=look.closing,
        earlier=earlier,
    )
    return Group(*above, body)


def _line(text: str, *, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def as_data(replicas: Sequence[Replica], state: PickerState | None, *, now: float) -> Mapping[str, Any]:
    """Return the replicas (url, connected, age_seconds, problem) and the merged `state` as one document."""
    return {
        "replicas": [
            {
                "url": replica.url,
                "connected": replica.problem is None and replica.state is not None,
                "age_seconds": None if replica.heard_at is None else round(now - replica.heard_at, 3),
                "problem": replica.problem,
            }
            for replica in replicas
        ],
        "state": state,
    }


def write_anything(stream: TextIO) -> None:
    """Make the stream write `?` for characters outside its encoding, which would otherwise raise in the view."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")


async def _asked(session: aiohttp.ClientSession, replica: Replica, pool: str | None, login: AdminLogin) -> Replica:
    found = await fetch_state(session, replica.url, pool=pool, login=login)
    if isinstance(found, str):
        return replace(replica, problem=found)
    return Replica(url=replica.url, state=found, heard_at=time.monotonic())


def view_console() -> Console:
    """Return a console on standard output that does not block if it is a terminal."""
    return Console(file=standard_output())


def print_once(
    urls: Sequence[str], console: Console, *, pool: str | None, login: AdminLogin, form: OutputForm, sort_by: str | None
) -> int:
    """Print the state once. Return the exit code: 1 if no replica answers, 2 if the pool is unknown, else 0."""
    replicas = asyncio.run(look_once(urls, pool=pool, login=login))
    state, now = added_up(replicas), time.monotonic()
    if form is OutputForm.TABLE:
        height = console.size.height if console.is_terminal else 10_000
        width = console.size.width if console.is_terminal else WIDE_ENOUGH
        look = Look(sort_by=sort_by)
        shown = top_page(replicas, state, look, now=now, zone=local_zone(), width=width, height=height)
        Console(width=width, file=console.file).print(shown)
    else:
        print_data(as_data(replicas, state, now=now), form)
    if state is not None:
        return 0
    return 2 if pool is not None and all("status 404" in (each.problem or "") for each in replicas) else 1

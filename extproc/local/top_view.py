"""`kvmesh top`: the live view of a running cluster, from the admin pages of one or several replicas. Changes nothing.

The page is that of `kvmesh up` with the replicas above it. What each replica counts by itself (picks, bookings, waiting
requests) is summed; what all of them see of the same pods and the same index is taken from the one that was heard last,
the worse word where they differ. A replica that cannot be reached is shown with the age of what is known of it and
asked again.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import tzinfo
from io import TextIOWrapper
from typing import Any, TextIO, TypeVar

import aiohttp
import msgspec
from msgspec.structs import replace
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from extproc.local.live_view import SafeView, draw_lines, fetch_state, page
from extproc.local.top_keys import HELP, TopChoice, chosen, pressed, status
from extproc.local.top_totals import Seen, lines, totals_of
from extproc.pages.picker_state import ClassState, EndpointState, MeasuredState, PickerState
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.output.forms import OutputForm, in_form
from kvmesh.plain_text import printable

REFRESH_SECONDS = 1.0
CLOSING = "Ctrl-C leaves"
KEYS = "q quits  / filters  s sorts  p pauses  ? helps"
AS_IT_IS = TopChoice()
MOST_DECISIONS = 50
# the worst first
_ENDPOINT_STATES = ("unreachable", "not-ready", "terminating", "unknown", "ready")
_INDEX_STATES = ("unavailable", "unknown", "stale", "ok")

T = TypeVar("T")


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as it was heard last; times are monotonic seconds."""

    url: str
    state: PickerState | None = None  # None: it has not answered yet
    heard_at: float | None = None
    problem: str | None = None  # of the last attempt; None: it worked

    def line(self, *, now: float) -> str:
        """Say how it stands."""
        if self.problem is None:
            return f"{self.url}: " + ("connected" if self.state is not None else "not asked yet")
        if self.heard_at is None:
            return f"{self.url}: not heard yet, trying again: {self.problem}"
        return f"{self.url}: lost for {now - self.heard_at:.0f} s, trying again: {self.problem}"


Show = Callable[[Sequence[Replica], PickerState | None, float], None]


def added_up(replicas: Iterable[Replica]) -> PickerState | None:
    """Return the state of all that were heard, the lost ones as they were; None: none was."""
    heard = sorted(replicas, key=lambda replica: -(replica.heard_at or 0.0))
    states = [replica.state for replica in heard if replica.state is not None]
    if len(states) <= 1:
        return states[0] if states else None
    newest = states[0]
    # of one replica, always the same: each has counted since another time
    measured = max(
        (r.state.ttft for r in heard if r.state is not None and r.problem is None), key=_counted, default=newest.ttft
    )
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


def _counted(measured: MeasuredState) -> float:
    return sum(measured.counts)


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
    """Return the share of all replicas' judged requests of a class that were within all targets."""
    judged = sum(each.judged for each in same)
    return sum(each.judged * (each.attainment or 0.0) for each in same) / judged if judged else None


def _groups(lines: Iterable[T], name_of: Callable[[T], str]) -> Collection[Sequence[T]]:
    """Return the lines of all replicas, those of one name together, the newest first."""
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
    """Ask all replicas once a second and show what they say, until cancelled; a slow one holds up no other."""
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


class TopScreen:
    """Draws each state over the one before, as the person at the terminal has chosen."""

    def __init__(self, live: Live, *, hears_keys: bool, zone: tzinfo | None = None) -> None:
        self.choice = TopChoice()
        self._live = live
        self._closing = KEYS if hears_keys else CLOSING
        self._zone = zone
        self._seen = Seen()
        self._shown: tuple[Sequence[Replica], PickerState | None, PickerState | None, float] | None = None

    def show(self, replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        """Draw what is known now; a page that is paused stays."""
        answering = [replica.url for replica in replicas if replica.problem is None and replica.state is not None]
        earlier = self._seen.before(state, answering=answering) if state is not None else None
        if self._shown is None or not self.choice.is_paused:
            self._shown = replicas, state, earlier, now
        self.draw()

    def press(self, key: str) -> None:
        """Take a key."""
        self.choice = pressed(self.choice, key)
        self.draw()

    def draw(self) -> None:
        """Draw what was shown last, as it is chosen now."""
        if self._shown is None:
            return
        replicas, state, earlier, now = self._shown
        width, height = self._live.console.size
        page = top_page(
            replicas,
            state,
            now=now,
            zone=self._zone,
            width=width,
            height=height,
            earlier=earlier,
            choice=self.choice,
            closing=self._closing,
        )
        self._live.update(page, refresh=True)


def show_lines(console: Console, *, zone: tzinfo | None) -> Show:
    """Print each decision once, and each replica's troubles when they begin and end: for pipes and logs."""
    view = SafeView(draw_lines(console, zone=zone))
    problems: dict[str, str | None] = {}

    def draw(replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        for replica in replicas:
            if replica.problem != problems.get(replica.url):
                problems[replica.url] = replica.problem
                console.print(printable(replica.line(now=now)), markup=False, highlight=False, soft_wrap=True)
        if state is not None:
            view.show(state)

    return draw


def show_data(console: Console, form: OutputForm) -> Show:
    """Print one JSON document a line, or YAML documents."""

    def draw(replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        known = as_data(replicas, state, now=now)
        text = msgspec.json.encode(known).decode() if form is OutputForm.JSON else f"---\n{in_form(known, form)}"
        console.out(text, highlight=False)

    return draw


def top_page(
    replicas: Sequence[Replica],
    state: PickerState | None,
    *,
    now: float,
    zone: tzinfo | None,
    width: int,
    height: int,
    earlier: PickerState | None = None,
    choice: TopChoice = AS_IT_IS,
    closing: str = CLOSING,
) -> Group:
    """At most `height` lines: the replicas in one line while all answer, one line for each that does not, the page.

    `earlier` is an answer from before, to tell what has come since.
    """
    lost = [replica for replica in replicas if replica.problem is not None]
    connected = sum(replica.problem is None and replica.state is not None for replica in replicas)
    head = f"kvmesh top    {connected} of {len(replicas)} replicas connected"
    head += f"    {printable(status(choice))}" if status(choice) else ""
    above = [Text(head, style="bold", no_wrap=True, overflow="ellipsis")]
    room = max(height // 3, 1)
    for replica in lost if len(lost) <= room else lost[: room - 1]:
        above.append(Text(printable(replica.line(now=now)), style="red", no_wrap=True, overflow="ellipsis"))
    if len(lost) > room:
        above.append(Text(f"and {len(lost) - room + 1} more are lost", style="red", no_wrap=True))
    if choice.shows_help:
        return Group(*above, *(Text(f"  {key:<4}{does}", no_wrap=True, overflow="ellipsis") for key, does in HELP))
    if state is None:
        return Group(*above)
    if not connected:
        above.append(Text("what is shown below is old", style="red"))
    body = page(
        chosen(state, choice),
        zone=zone,
        width=width,
        height=height - len(above),
        lines_above=0,
        closing=closing,
        totals=totals_of(state.endpoints) if len(state.endpoints) > 1 else None,
        below_pods=lines(state, earlier, width=width),
    )
    return Group(*above, body)


def as_data(replicas: Sequence[Replica], state: PickerState | None, *, now: float) -> Mapping[str, Any]:
    """Return all that is known as one document: `replicas` (url, connected, age_seconds, problem) and `state`."""
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
    """Have it write `?` for what its encoding does not have: one such sign from a client would end the view."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")


async def _asked(session: aiohttp.ClientSession, replica: Replica, pool: str | None, login: AdminLogin) -> Replica:
    found = await fetch_state(session, replica.url, pool=pool, login=login)
    if isinstance(found, str):
        return replace(replica, problem=found)
    return Replica(url=replica.url, state=found, heard_at=time.monotonic())

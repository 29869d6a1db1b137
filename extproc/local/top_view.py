"""`kvmesh top`: the live view of a running cluster, from the admin pages of one or several replicas. Changes nothing.

Called by `top_commands`. The page is that of `kvmesh up` (`live_page`) with the replicas above it; a replica that
cannot be reached is shown with the age of what is known of it and asked again.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, tzinfo
from io import TextIOWrapper
from typing import TextIO

import aiohttp
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from extproc.local.live_page import page
from extproc.local.live_view import SafeView, draw_lines
from extproc.local.picker_state import PickerState, fetch_state
from extproc.local.replica_states import Replica, added_up
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.plain_text import printable

REFRESH_SECONDS = 1.0
CLOSING = "Ctrl-C leaves"

Show = Callable[[Sequence[Replica], PickerState | None, float], None]


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


def show_pages(live: Live, *, zone: tzinfo | None = None) -> Show:
    """Draw each state over the one before."""

    def draw(replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        width, height = live.console.size
        live.update(top_page(replicas, state, now=now, zone=zone, width=width, height=height), refresh=True)

    return draw


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


def show_json(console: Console) -> Show:
    """Print one JSON document a line."""

    def draw(replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        console.out(as_json(replicas, state, now=now).decode(), highlight=False)

    return draw


def top_page(
    replicas: Sequence[Replica],
    state: PickerState | None,
    *,
    now: float,
    zone: tzinfo | None,
    width: int,
    height: int,
) -> Group:
    """At most `height` lines: the replicas in one line while all answer, one line for each that does not, the page."""
    lost = [replica for replica in replicas if replica.problem is not None]
    connected = sum(replica.problem is None and replica.state is not None for replica in replicas)
    head = Text(f"kvmesh top    {connected} of {len(replicas)} replicas connected", no_wrap=True, overflow="ellipsis")
    head.stylize("bold")
    room = max(height // 3, 1)
    lines = [_lost_line(replica, now=now) for replica in lost[:room]]
    if len(lost) > room:
        lines[-1] = Text(f"and {len(lost) - room + 1} more are lost", style="red", no_wrap=True)
    left = height - 1 - len(lines)
    if state is None:
        return Group(head, *lines)
    style = "dim" if not connected else ""
    shown = page(state, zone=zone, width=width, height=left, lines_above=0, closing=CLOSING)
    old = [Text("what is shown below is old", style="red")] if style else []
    if old:
        shown = page(state, zone=zone, width=width, height=left - 1, lines_above=0, closing=CLOSING)
    return Group(head, *lines, *old, shown)


def as_json(replicas: Sequence[Replica], state: PickerState | None, *, now: float) -> bytes:
    """Return all that is known as one document: `replicas` (url, connected, age_seconds, problem) and `state`."""
    return msgspec.json.encode(
        {
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
    )


def write_anything(stream: TextIO) -> None:
    """Have it write `?` for what its encoding does not have: one such sign from a client would end the view."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")


def local_zone() -> tzinfo | None:
    """Return the time zone that clocks are shown in."""
    return datetime.now(UTC).astimezone().tzinfo


def _lost_line(replica: Replica, *, now: float) -> Text:
    return Text(printable(replica.line(now=now)), style="red", no_wrap=True, overflow="ellipsis")


async def _asked(session: aiohttp.ClientSession, replica: Replica, pool: str | None, login: AdminLogin) -> Replica:
    found = await fetch_state(session, replica.url, pool=pool, login=login)
    if isinstance(found, str):
        return msgspec.structs.replace(replica, problem=found)
    return Replica(url=replica.url, state=found, heard_at=time.monotonic())

"""The terminal view of `kvmesh up`: pods and the last decisions, or plain lines where there is no terminal.

Called by `service` once all is ready; reads the picker's admin page and changes nothing. What it shows is made in
`live_page`; nothing that goes wrong here may end the mesh.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, tzinfo

import aiohttp
from rich.console import Console
from rich.live import Live
from rich.text import Text

from extproc.local.greeting import lines_on_screen
from extproc.local.live_page import decision_line, page
from extproc.local.picker_state import DecisionState, PickerState, fetch_state
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.plain_text import printable

log = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5

Draw = Callable[[PickerState | str], None]


async def show_live(
    admin_url: str, *, console: Console, above: Sequence[Text], login: AdminLogin | None = None
) -> None:
    """Show the state until cancelled; `above` was printed before and stays in sight where the terminal is tall.

    `login`: what the admin pages are shown, where they want a token.
    """
    zone = datetime.now(UTC).astimezone().tzinfo
    if not console.is_terminal or console.is_dumb_terminal:  # that can draw nothing over what is there
        await _follow(admin_url, SafeView(draw_lines(console, zone=zone)), login)
        return
    with Live(console=console, auto_refresh=False) as live:
        await _follow(admin_url, SafeView(draw_pages(live, zone=zone, above=above)), login)


class SafeView:
    """Draws states; one that cannot be drawn is logged and becomes a plain line."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._last_problem = ""

    def show(self, state: PickerState | str) -> None:
        """Draw it. Raises nothing."""
        try:
            self._draw(state)
        except Exception as error:
            problem = f"the mesh runs, but its state cannot be shown: {type(error).__name__}: {printable(str(error))}"
            if problem != self._last_problem:  # not twice a second
                log.warning("the live view cannot be drawn", exc_info=error)
            self._last_problem = problem
            with contextlib.suppress(Exception):
                self._draw(problem)
        else:
            self._last_problem = ""


def draw_pages(live: Live, *, zone: tzinfo | None, above: Sequence[Text]) -> Draw:
    """Draw each state over the one before."""

    def draw(state: PickerState | str) -> None:
        width, height = live.console.size
        lines_above = lines_on_screen(above, width=width)
        live.update(page(state, zone=zone, width=width, height=height, lines_above=lines_above), refresh=True)

    return draw


def draw_lines(console: Console, *, zone: tzinfo | None) -> Draw:
    """Print each decision once, and each problem when it is a new one."""
    seen_until = 0.0
    last_problem = ""

    def draw(state: PickerState | str) -> None:
        nonlocal seen_until, last_problem
        if isinstance(state, str):
            if state != last_problem:
                console.print(printable(state), markup=False, highlight=False, emoji=False, soft_wrap=True)
            last_problem = state
            return
        last_problem = ""
        for decision in new_decisions(state.decisions, after=seen_until):
            seen_until = decision.at
            line = decision_line(decision, zone=zone)
            console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    return draw


def new_decisions(decisions: Iterable[DecisionState], *, after: float) -> list[DecisionState]:
    """The decisions made after that Unix time, oldest first."""
    return sorted((decision for decision in decisions if decision.at > after), key=lambda decision: decision.at)


async def _follow(admin_url: str, view: SafeView, login: AdminLogin | None) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            view.show(await fetch_state(session, admin_url, login=login))
            await asyncio.sleep(REFRESH_SECONDS)

"""What keys do in `kvmesh top`: filter, sort, pause, help, quit. Pure.

A key changes the `TopChoice`; the choice is applied to what the pickers say, and the page shows the rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from extproc.pages.picker_state import DecisionState, EndpointState, PickerState

ESCAPE, ENTER, BACKSPACE = "\x1b", ("\r", "\n"), ("\x7f", "\b")
LONGEST_FILTER = 60
# column -> what pods are sorted by; the most comes first, and what is not known last
COLUMNS: Mapping[str, Callable[[EndpointState], float | None]] = {
    "blocks": lambda pod: pod.cached_blocks,
    "run": lambda pod: pod.running,
    "wait": lambda pod: pod.waiting,
    "KV": lambda pod: pod.kv_usage,
    "hits": lambda pod: pod.hit_rate,
    "picks": lambda pod: pod.picks,
}
AS_CONFIGURED = ""
ORDER = (AS_CONFIGURED, *COLUMNS)
HELP = (
    ("q", "quit"),
    ("/", "show only pods and decisions with some text: Enter keeps it, Esc drops it"),
    ("s", f"sort the pods by the next column: {', '.join(COLUMNS)}, or as configured"),
    ("r", "turn the order round"),
    ("p", "pause, and go on"),
    ("?", "this list, and away with it"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopChoice:
    """What the person at the terminal has chosen."""

    text: str = ""  # only what has it is shown
    is_typing: bool = False  # the text
    sorted_by: str = AS_CONFIGURED
    is_turned: bool = False
    is_paused: bool = False
    shows_help: bool = False
    has_quit: bool = False


KEYS: Mapping[str, Callable[[TopChoice], TopChoice]] = {
    "q": lambda choice: replace(choice, has_quit=True),
    "/": lambda choice: replace(choice, is_typing=True, shows_help=False),
    "s": lambda choice: replace(choice, sorted_by=ORDER[(ORDER.index(choice.sorted_by) + 1) % len(ORDER)]),
    "r": lambda choice: replace(choice, is_turned=not choice.is_turned),
    "p": lambda choice: replace(choice, is_paused=not choice.is_paused),
    "?": lambda choice: replace(choice, shows_help=not choice.shows_help),
    ESCAPE: lambda choice: replace(choice, text="", shows_help=False),
}


def pressed(choice: TopChoice, key: str) -> TopChoice:
    """Return the choice after a key; one that means nothing changes nothing."""
    if choice.is_typing:
        return _typed(choice, key)
    does = KEYS.get(key)
    return choice if does is None else does(choice)


def _typed(choice: TopChoice, key: str) -> TopChoice:
    if key == ESCAPE:
        return replace(choice, is_typing=False, text="")
    if key in ENTER:
        return replace(choice, is_typing=False)
    if key in BACKSPACE:
        return replace(choice, text=choice.text[:-1])
    return replace(choice, text=(choice.text + key)[:LONGEST_FILTER]) if key.isprintable() else choice


def chosen(state: PickerState, choice: TopChoice) -> PickerState:
    """Return what of it is to be shown, in the order that was chosen."""
    endpoints, decisions = list(state.endpoints), state.decisions
    if choice.text:
        wanted = choice.text.lower()
        endpoints = [each for each in endpoints if wanted in _words_of_pod(each)]
        decisions = [each for each in decisions if wanted in _words_of_decision(each)]
    if choice.sorted_by != AS_CONFIGURED:
        value = COLUMNS[choice.sorted_by]
        known = [each for each in endpoints if value(each) is not None]
        unknown = [each for each in endpoints if value(each) is None]
        endpoints = sorted(known, key=lambda pod: -(value(pod) or 0.0)) + unknown
    if choice.is_turned:
        endpoints.reverse()
    return structs.replace(state, endpoints=endpoints, decisions=decisions)


def status(choice: TopChoice) -> str:
    """Say what is chosen, "" where all is as at the start."""
    parts = ["paused"] if choice.is_paused else []
    if choice.sorted_by or choice.is_turned:
        parts.append(f"sorted by {choice.sorted_by or 'configuration'}{', turned round' if choice.is_turned else ''}")
    if choice.text or choice.is_typing:
        parts.append(f"with /{choice.text}{'_' if choice.is_typing else ''}")
    return "    ".join(parts)


def _words_of_pod(pod: EndpointState) -> str:
    return " ".join([pod.address, pod.state, pod.role, *(pod.models or ())]).lower()


def _words_of_decision(decision: DecisionState) -> str:
    parts = (decision.endpoint, decision.path, decision.model, decision.class_name, decision.reason, decision.why)
    return " ".join([*(part for part in parts if part), *decision.degraded]).lower()

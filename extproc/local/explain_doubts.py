"""What in a question to `kvmesh explain` cannot be meant, or counts for nothing: said beside the answer. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from extproc.pages.picker_state import DecisionState, PickerState

NOT_MEANT = 2  # exit codes
NOT_SERVED = 1
WELL = 0
MOST_NAMED = 10
UNSUPPORTED = "prompt-unsupported"  # of a body that was read


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """One of them, with the exit code that it is worth."""

    words: str
    exit_code: int


def doubts(
    answer: DecisionState, there: PickerState, *, objective: str | None, path: str | None, host: str | None
) -> Iterator[Doubt]:
    """Yield what is to be said of an answer; `there` is the picker's state, the rest what was asked for."""
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
    """Say that no pod serves the model, where each pod has told what it serves."""
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

"""Degradation of a class under pressure, before it is refused: which declared steps are in force, with hysteresis.

Asked once per request. Pure: pressure and time are arguments. Neither measures pressure nor edits requests
(`admission.output_cap`).
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from extproc.policy.priority import DegradationStep, StepKind
from extproc.policy.request_class import PriorityPolicy
from extproc.requests.request import ApiKind, InferenceRequest, TokenPrompt

# after this long without a request of the class a step needs `enter` again: the old pressure is out of date
REMEMBERED_SECONDS = 60.0
MAX_POOLS = 1000  # classes times pools; the rest share one pool: clients may invent names of models

_GENERATING = frozenset((ApiKind.CHAT_COMPLETIONS, ApiKind.COMPLETIONS, ApiKind.RESPONSES, ApiKind.MESSAGES))


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """The combined effect of the steps in force."""

    steps: tuple[DegradationStep, ...] = ()  # in the policy's order
    output_tokens: int | None = None  # cap-output: the tightest, or None without a cap
    prompt_tokens: int | None = None  # limit-prompt: the tightest
    model: str | None = None  # smaller-model: the one with the highest `enter`
    no_remote_prefill: bool = False
    reject: bool = False


NO_MEASURES = Measures()


class StepChange(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was just entered or left, for the log and a metric."""

    class_name: str
    pool: str
    step: DegradationStep
    entered: bool
    pressure: float


class StepInForce(msgspec.Struct, frozen=True, kw_only=True):
    """A step in force, for pages and gauges."""

    class_name: str
    pool: str
    step: DegradationStep
    since: float  # when it was entered
    pressure: float  # at the last request


class _State:
    """One class in one pool; exists only while a step is in force."""

    __slots__ = ("asked_at", "entered_at", "measures", "pressure")

    def __init__(self, steps: int) -> None:
        self.entered_at: list[float | None] = [None] * steps
        self.asked_at = 0.0
        self.pressure = 0.0
        self.measures = NO_MEASURES


class Degradation:
    """Which steps are in force, for each class in each pool."""

    def __init__(self, policy: PriorityPolicy, *, on_change: Callable[[StepChange], None] | None = None) -> None:
        self._steps = {name: found.degrade for name, found in policy.classes.items() if found.degrade}
        self._least_enter = {name: min(step.enter for step in steps) for name, steps in self._steps.items()}
        self._on_change = on_change
        self._states: dict[tuple[str, str], _State] = {}

    def reconfigure(self, policy: PriorityPolicy) -> None:
        """Replace the policy. Classes with unchanged steps keep their steps in force."""
        before = self._steps
        self._steps = {name: found.degrade for name, found in policy.classes.items() if found.degrade}
        self._least_enter = {name: min(step.enter for step in steps) for name, steps in self._steps.items()}
        self._states = {
            key: state for key, state in self._states.items() if self._steps.get(key[0]) == before.get(key[0])
        }

    def measures(self, class_name: str, *, pressure: float, now: float, pool: str = "") -> Measures:
        """Return the measures for a request that arrives now; without steps in force the object NO_MEASURES itself.

        `pressure` is the expected share of the class's target (1.0: on target), of TTFT or of inter-token time,
        whichever is worse. NaN changes nothing.
        """
        steps = self._steps.get(class_name)
        if steps is None:
            return NO_MEASURES
        state = self._states.get((class_name, pool))
        if state is None:
            if not pressure >= self._least_enter[class_name]:
                return NO_MEASURES
            state, pool = self._new_state(class_name, pool, now=now)
        self._update(state, steps, class_name, pool, pressure=pressure, now=now)
        return state.measures

    def in_force(self, *, now: float) -> Sequence[StepInForce]:
        """Return the steps in force of classes with a recent request, by class, pool and the policy's order."""
        return [
            StepInForce(class_name=class_name, pool=pool, step=step, since=entered_at, pressure=state.pressure)
            for (class_name, pool), state in sorted(self._states.items())
            if not _is_forgotten(state, now=now)
            for step, entered_at in zip(self._steps[class_name], state.entered_at, strict=True)
            if entered_at is not None
        ]

    def _new_state(self, class_name: str, pool: str, *, now: float) -> tuple[_State, str]:
        if len(self._states) >= MAX_POOLS:
            self._states = {key: state for key, state in self._states.items() if not _is_forgotten(state, now=now)}
            if len(self._states) >= MAX_POOLS:
                pool = ""
        state = self._states.get((class_name, pool))
        if state is None:
            state = self._states[class_name, pool] = _State(len(self._steps[class_name]))
            state.asked_at = now
        return state, pool

    def _update(
        self,
        state: _State,
        steps: tuple[DegradationStep, ...],
        class_name: str,
        pool: str,
        *,
        pressure: float,
        now: float,
    ) -> None:
        forgotten = _is_forgotten(state, now=now)
        state.asked_at, state.pressure = now, pressure
        changed = False
        for i, step in enumerate(steps):
            entered_at = state.entered_at[i]
            if entered_at is None:
                if not pressure >= step.enter:
                    continue
                state.entered_at[i] = now
            else:
                lasted = now - entered_at >= step.least_seconds
                if not (lasted and pressure < (step.enter if forgotten else step.leave)):
                    continue
                state.entered_at[i] = None
            changed = True
            if self._on_change is not None:
                entered = entered_at is None
                self._on_change(
                    StepChange(class_name=class_name, pool=pool, step=step, entered=entered, pressure=pressure)
                )
        if changed:
            state.measures = measures_of(
                [step for step, entered_at in zip(steps, state.entered_at, strict=True) if entered_at is not None]
            )
            if state.measures is NO_MEASURES:
                del self._states[class_name, pool]


def _is_forgotten(state: _State, *, now: float) -> bool:
    return now - state.asked_at > REMEMBERED_SECONDS


def measures_of(steps: Sequence[DegradationStep]) -> Measures:
    """Combine steps: the tightest limits count, and the model of the step with the highest `enter`."""
    if not steps:
        return NO_MEASURES
    kinds = {step.step for step in steps}
    models = [step for step in steps if step.step is StepKind.SMALLER_MODEL]
    return Measures(
        steps=tuple(steps),
        output_tokens=_tightest(steps, StepKind.CAP_OUTPUT),
        prompt_tokens=_tightest(steps, StepKind.LIMIT_PROMPT),
        model=max(models, key=lambda step: step.enter).model if models else None,
        no_remote_prefill=StepKind.NO_REMOTE_PREFILL in kinds,
        reject=StepKind.REJECT in kinds,
    )


def _tightest(steps: Iterable[DegradationStep], kind: StepKind) -> int | None:
    return min((step.tokens for step in steps if step.step is kind), default=None)


def may_change_model(request: InferenceRequest, *, adapter: str | None) -> bool:
    """Tell whether a smaller model may answer: it has another tokenizer, no adapters, and perhaps no vision."""
    return (
        request.api in _GENERATING
        and adapter is None
        and not request.has_media
        and not any(isinstance(prompt, TokenPrompt) for prompt in request.prompts)
    )


def took(measures: Measures, *, capped: bool, model_changed: bool) -> tuple[StepKind, ...]:
    """Return the kinds of steps that changed one request, in the policy's order; its response names them.

    `capped` says that its output limit was lowered: a request for less than the cap has lost nothing.
    """
    happened = {
        StepKind.CAP_OUTPUT: capped,
        StepKind.SMALLER_MODEL: model_changed,
        StepKind.NO_REMOTE_PREFILL: measures.no_remote_prefill,
    }
    return tuple(dict.fromkeys(step.step for step in measures.steps if happened.get(step.step, False)))


def words_of(kinds: Iterable[StepKind]) -> str:
    """Return the value of `x-kvmesh-degraded`, e.g. "cap-output, smaller-model"."""
    return ", ".join(dict.fromkeys(kinds))

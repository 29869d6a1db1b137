"""Steps of degradation are entered at once, left late, and forgotten when nobody asks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission.degradation import (
    MAX_POOLS,
    NO_MEASURES,
    REMEMBERED_SECONDS,
    Degradation,
    Measures,
    StepChange,
    StepInForce,
    may_change_model,
    measures_of,
    took,
    words_of,
)
from extproc.policy.priority import DegradationStep, PriorityClass, StepKind
from extproc.policy.request_class import PriorityPolicy
from extproc.requests.request import ApiKind, InferenceRequest, TextPrompt, TokenPrompt

CAP = DegradationStep(step=StepKind.CAP_OUTPUT, enter=1.0, leave=0.7, tokens=200)
LIMIT = DegradationStep(step=StepKind.LIMIT_PROMPT, enter=1.5, leave=1.2, tokens=4000, least_seconds=10.0)
STEPS = (CAP, LIMIT)


def degradation(*steps: DegradationStep, seen: list[StepChange] | None = None) -> Degradation:
    policy = PriorityPolicy(classes={"batch": PriorityClass(degrade=steps), "chat": PriorityClass()})
    return Degradation(policy, on_change=None if seen is None else seen.append)


def test_a_step_is_entered_at_its_pressure_and_left_below_its_own_lower_one() -> None:
    subject = degradation(*STEPS)
    pressures = [0.9, 1.0, 0.8, 1.5, 1.3, 0.69, 1.3]
    assert [
        subject.measures("batch", pressure=pressure, now=10.0 * i).steps for i, pressure in enumerate(pressures)
    ] == [
        (),
        (CAP,),
        (CAP,),
        (CAP, LIMIT),
        (CAP, LIMIT),
        (),
        (CAP,),
    ]


def test_a_step_lasts_its_least_seconds_whatever_the_pressure() -> None:
    subject = degradation(*STEPS)
    subject.measures("batch", pressure=2.0, now=0.0)
    assert [subject.measures("batch", pressure=0.0, now=now).steps for now in (1.0, 4.9, 5.0, 9.9, 10.0)] == [
        (CAP, LIMIT),
        (CAP, LIMIT),
        (LIMIT,),
        (LIMIT,),
        (),
    ]


def test_classes_and_pools_stand_by_themselves() -> None:
    subject = degradation(CAP)
    assert subject.measures("batch", pressure=2.0, now=0.0, pool="a").steps == (CAP,)
    assert subject.measures("batch", pressure=0.8, now=0.0, pool="b").steps == ()
    assert subject.measures("batch", pressure=0.8, now=0.0, pool="a").steps == (CAP,)
    assert subject.measures("chat", pressure=9.0, now=0.0, pool="a") is NO_MEASURES
    assert subject.measures("unheard-of", pressure=9.0, now=0.0) is NO_MEASURES


def test_where_no_step_is_in_force_the_constant_is_returned() -> None:
    subject = degradation(CAP)
    before = subject.measures("batch", pressure=0.9, now=0.0)
    subject.measures("batch", pressure=1.0, now=0.0)
    after = subject.measures("batch", pressure=0.0, now=5.0)
    assert (before is NO_MEASURES, after is NO_MEASURES) == (True, True)


def test_a_step_that_nobody_asked_for_in_a_while_needs_its_entering_pressure_again() -> None:
    asked_again = [degradation(CAP), degradation(CAP)]
    for subject in asked_again:
        subject.measures("batch", pressure=1.0, now=0.0)
    assert [
        subject.measures("batch", pressure=0.8, now=now).steps
        for subject, now in zip(asked_again, (REMEMBERED_SECONDS, REMEMBERED_SECONDS + 1), strict=True)
    ] == [(CAP,), ()]


def test_a_pressure_that_is_no_number_changes_nothing_and_an_endless_one_enters() -> None:
    subject = degradation(CAP)
    nan, infinite = float("nan"), float("inf")
    steps = [subject.measures("batch", pressure=pressure, now=10.0).steps for pressure in (nan, infinite, nan)]
    assert steps == [(), (CAP,), (CAP,)]


def test_every_change_is_told_once_with_its_pressure() -> None:
    seen: list[StepChange] = []
    subject = degradation(*STEPS, seen=seen)
    for now, pressure in ((0.0, 1.6), (1.0, 1.6), (20.0, 1.0), (30.0, 0.5)):
        subject.measures("batch", pressure=pressure, now=now, pool="m")
    assert [(change.step, change.entered, change.pressure) for change in seen] == [
        (CAP, True, 1.6),
        (LIMIT, True, 1.6),
        (LIMIT, False, 1.0),
        (CAP, False, 0.5),
    ]
    assert {(change.class_name, change.pool) for change in seen} == {("batch", "m")}


def test_pages_see_what_is_in_force_and_was_asked_for_lately() -> None:
    subject = degradation(*STEPS)
    subject.measures("batch", pressure=1.1, now=0.0, pool="b")
    subject.measures("batch", pressure=0.9, now=50.0, pool="b")
    subject.measures("batch", pressure=1.2, now=3.0, pool="a")
    expected = [
        StepInForce(class_name="batch", pool="a", step=CAP, since=3.0, pressure=1.2),
        StepInForce(class_name="batch", pool="b", step=CAP, since=0.0, pressure=0.9),
    ]
    assert [list(subject.in_force(now=now)) for now in (60.0, 70.0, 200.0)] == [expected, expected[1:], []]


def test_pools_beyond_the_limit_share_one_and_forgotten_ones_make_room() -> None:
    subject = degradation(CAP)
    for i in range(MAX_POOLS):
        subject.measures("batch", pressure=1.0, now=0.0, pool=f"m{i}")
    assert subject.measures("batch", pressure=1.0, now=1.0, pool="one more").steps == (CAP,)
    assert {step.pool for step in subject.in_force(now=1.0) if not step.pool.startswith("m")} == {""}
    later = REMEMBERED_SECONDS + 2
    assert subject.measures("batch", pressure=1.0, now=later, pool="another").steps == (CAP,)
    assert [step.pool for step in subject.in_force(now=later)] == ["another"]


@settings(max_examples=200)
@given(asked=st.lists(st.tuples(st.floats(0, 20), st.floats(allow_nan=True)), max_size=30))
def test_whatever_the_pressure_does_a_step_neither_ends_early_nor_stays_behind(
    asked: list[tuple[float, float]],
) -> None:
    seen: list[StepChange] = []
    subject = degradation(*STEPS, seen=seen)
    now = 0.0
    entered: dict[StepKind, float] = {}
    for seconds, pressure in asked:
        now += seconds
        seen.clear()
        steps = subject.measures("batch", pressure=pressure, now=now).steps
        for change in seen:
            if change.entered:
                assert pressure >= change.step.enter
                entered[change.step.step] = now
            else:
                assert now - entered.pop(change.step.step) >= change.step.least_seconds
                assert pressure < change.step.leave
        assert {step.step for step in steps} == set(entered)
        assert {step.step for step in subject.in_force(now=now)} == set(steps)


def smaller(enter: float, model: str) -> DegradationStep:
    return DegradationStep(step=StepKind.SMALLER_MODEL, enter=enter, leave=0.5, model=model)


def test_steps_of_one_kind_are_drawn_together() -> None:
    tighter = DegradationStep(step=StepKind.CAP_OUTPUT, enter=2.0, leave=1.0, tokens=50)
    prefill = DegradationStep(step=StepKind.NO_REMOTE_PREFILL, enter=1.0, leave=0.5)
    reject = DegradationStep(step=StepKind.REJECT, enter=3.0, leave=2.0)
    steps = (tighter, CAP, smaller(2.0, "8b"), smaller(1.0, "70b"), LIMIT, prefill, reject)
    assert measures_of(steps) == Measures(
        steps=steps, output_tokens=50, prompt_tokens=4000, model="8b", no_remote_prefill=True, reject=True
    )
    assert measures_of(()) is NO_MEASURES


@pytest.mark.parametrize(
    ("capped", "model_changed", "words"),
    [
        (False, False, "no-remote-prefill"),
        (True, False, "cap-output, no-remote-prefill"),
        (True, True, "smaller-model, cap-output, no-remote-prefill"),
    ],
)
def test_a_request_is_told_of_the_steps_that_changed_it(capped: bool, model_changed: bool, words: str) -> None:
    prefill = DegradationStep(step=StepKind.NO_REMOTE_PREFILL, enter=1.0, leave=0.5)
    measures = measures_of((smaller(0.5, "8b"), CAP, LIMIT, prefill, CAP))
    assert words_of(took(measures, capped=capped, model_changed=model_changed)) == words


TEXT = InferenceRequest(api=ApiKind.COMPLETIONS, path="/v1/completions", prompts=(TextPrompt(text="a"),))


@pytest.mark.parametrize(
    ("request_", "adapter", "expected"),
    [
        (TEXT, None, True),
        (TEXT, "sql-lora", False),
        (InferenceRequest(api=ApiKind.COMPLETIONS, path="", prompts=(TokenPrompt.of([1]),)), None, False),
        (InferenceRequest(api=ApiKind.CHAT_COMPLETIONS, path="", has_media=True), None, False),
        (InferenceRequest(api=ApiKind.EMBEDDINGS, path="", prompts=(TextPrompt(text="a"),)), None, False),
    ],
)
def test_only_texts_for_a_base_model_may_be_answered_by_a_smaller_one(
    request_: InferenceRequest, adapter: str | None, expected: bool
) -> None:
    assert may_change_model(request_, adapter=adapter) is expected

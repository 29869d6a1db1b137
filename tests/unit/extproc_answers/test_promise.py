"""A request's headers tighten what its class is promised, never loosen it; what is not understood is said."""

import pytest

from extproc.answers.promise import IgnoredTarget, OpenPromise, Promise, TokenTargets, asked_targets, words_of_ignored
from extproc.policy.priority import PriorityClass

OF_CLASS = TokenTargets(ttft_seconds=5.0, inter_token_seconds=0.1)
UNREADABLE, LOOSER = IgnoredTarget.UNREADABLE, IgnoredTarget.LOOSER


@pytest.mark.parametrize("name", ["x-kvmesh-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"])
def test_a_header_tightens_the_time_to_the_first_token(name: str) -> None:
    assert asked_targets({name: "250"}, OF_CLASS) == (TokenTargets(ttft_seconds=0.25, inter_token_seconds=0.1), {})


@pytest.mark.parametrize("name", ["x-kvmesh-inter-token-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"])
def test_a_header_tightens_the_time_between_tokens(name: str) -> None:
    assert asked_targets({name: "12.5"}, OF_CLASS) == (TokenTargets(ttft_seconds=5.0, inter_token_seconds=0.0125), {})


def test_of_several_headers_the_tightest_counts() -> None:
    headers = {"x-slo-ttft-ms": "100", "x-kvmesh-ttft-ms": "300", "x-llm-d-slo-ttft-ms": "9000"}
    found, ignored = asked_targets(headers, OF_CLASS)
    assert found == TokenTargets(ttft_seconds=0.1, inter_token_seconds=0.1)
    assert ignored == {"x-llm-d-slo-ttft-ms": LOOSER}


def test_what_the_class_is_promised_anyway_changes_nothing() -> None:
    assert asked_targets({"x-slo-ttft-ms": "5000", "x-slo-tpot-ms": "100.0"}, OF_CLASS) == (None, {})


def test_a_header_loosens_nothing() -> None:
    assert asked_targets({"x-slo-ttft-ms": "5001", "x-slo-tpot-ms": "101"}, OF_CLASS) == (
        None,
        {"x-slo-ttft-ms": LOOSER, "x-slo-tpot-ms": LOOSER},
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0.0",
        "-1",
        "+1",
        "nan",
        "inf",
        "1e-3",
        "1_0",
        " 1",
        "1 ",
        "1,2",
        "0x1",
        "٣",
        "1.",
        ".5",
        "9" * 400,
        "ms",
    ],
)
def test_what_is_no_number_of_milliseconds_is_ignored_and_said(text: str) -> None:
    headers = {"x-slo-ttft-ms": text}
    found, ignored = asked_targets(headers, OF_CLASS)
    assert (found, ignored) == (None, {"x-slo-ttft-ms": UNREADABLE})
    (words,) = words_of_ignored(headers, ignored, OF_CLASS)
    assert words.startswith("the header x-slo-ttft-ms is ignored: ")
    assert words.endswith("is no number of milliseconds above 0")
    assert len(words) < 150


def test_a_looser_target_is_said_with_the_one_that_holds() -> None:
    headers = {"x-slo-ttft-ms": "9000", "x-slo-tpot-ms": "900"}
    assert words_of_ignored(headers, asked_targets(headers, OF_CLASS)[1], OF_CLASS) == (
        "the header x-slo-ttft-ms is ignored: the class is promised 5000 ms, which it may only tighten",
        "the header x-slo-tpot-ms is ignored: the class is promised 100 ms, which it may only tighten",
    )


@pytest.mark.parametrize(
    ("is_stream", "now", "is_broken"), [(True, 15.1, True), (True, 15.0, False), (False, 99.0, False)]
)
def test_only_a_stream_is_surely_late_before_its_first_token(is_stream: bool, now: float, is_broken: bool) -> None:
    promise = Promise(class_name="standard", tenant="none", model="m", targets=OF_CLASS)
    assert OpenPromise(promise=promise, arrived_at=10.0, is_stream=is_stream).is_broken(now=now) is is_broken


@pytest.mark.parametrize(
    ("item", "objective"),
    [
        (PriorityClass(), 0.99),
        (PriorityClass(sheddable=True), 0.9),
        (PriorityClass(sheddable=True, attainment=0.5), 0.5),
        (PriorityClass(attainment=0.999), 0.999),
    ],
)
def test_a_class_has_an_objective(item: PriorityClass, objective: float) -> None:
    assert item.objective == objective

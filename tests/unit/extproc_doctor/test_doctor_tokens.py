"""Tokens: which pods make others than the picker, and whom to mend where the pods differ from each other."""

from dataclasses import replace
from typing import Any

import pytest

from extproc.doctor.checks import judge
from extproc.doctor.facts import Facts, PickerFacts, PickerTokens
from extproc.doctor.findings import Severity
from extproc.prompts.token_probes import TokenComparison
from tests.unit.extproc_doctor.doctor_facts import facts, found, lines, pod


def compared(ours: tuple[int, ...] | None, theirs: tuple[int, ...] | None, **changes: Any) -> TokenComparison:
    same = TokenComparison(model="tiny", probe="chat", is_chat=True, ours=ours, theirs=theirs)
    return replace(same, **changes)


def test_a_missing_begin_of_text_is_recognised() -> None:
    text = compared((1, 2, 3), (9, 1, 2, 3), probe="completion", is_chat=False)
    [finding] = found("tokens", facts(pod(tokens=(text,))))

    assert finding.seen == "other tokens of tiny (completion): 3 here, 4 there, token 0 differs"
    assert "begin-of-text" in finding.fix


def test_a_prompt_that_both_sides_refuse_is_no_difference() -> None:
    refused = compared(None, None, our_problem="System role not supported", refused=True)

    assert found("tokens", facts(pod(tokens=(refused, compared((1,), (1,)))))) == []


def test_chats_that_only_the_pods_can_render_are_found() -> None:
    text = compared((1,), (1,), probe="completion", is_chat=False)
    chat = compared(None, (1, 2), our_problem="there is no template")
    [finding] = found("tokens", facts(pod(tokens=(text, chat))))

    assert finding.seen == "chats of tiny cannot be rendered here (chat): there is no template"
    assert "chat_template" in finding.fix


def test_tokens_that_one_pod_makes_differently_are_that_pods_finding() -> None:
    wrong = pod(endpoint="10.0.0.2:8000", tokens=(compared((1, 2), (1, 3)),))
    seen = facts(pod(tokens=(compared((1, 2), (1, 2)),)), wrong)

    assert [finding.subject for finding in found("tokens", seen)] == ["10.0.0.2:8000"]


def test_a_running_picker_that_explains_nothing_of_a_model_is_found() -> None:
    picker = PickerFacts(url="http://p", tokens=(PickerTokens(model="tiny", probe="chat", count=1),))
    other = compared((1,), (1,), model="big")
    seen = facts(pod(tokens=(compared((1,), (1,)), other)), picker=picker)

    assert lines("picker-tokens", seen) == [("warning", "http://p", "the running picker explains no request for big")]


RIGHT, WRONG = (1, 2), (1, 2, 3)


def of_pods(*theirs: tuple[int, ...], is_chat: bool = True) -> Facts:
    """Pods that make these tokens of a probe of which this command and the running picker make `RIGHT`."""
    probe = "chat" if is_chat else "completion"
    return facts(
        *(
            pod(endpoint=f"10.0.0.{at}:8000", tokens=(compared(RIGHT, tokens, probe=probe, is_chat=is_chat),))
            for at, tokens in enumerate(theirs)
        ),
        picker=PickerFacts(
            url="http://p", ready=True, tokens=(PickerTokens(model="tiny", probe=probe, count=len(RIGHT)),)
        ),
    )


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize(
    ("theirs", "begins"),
    [
        ((WRONG, RIGHT, RIGHT), "1 of 3 pods differs: mend that pod: start it with the others' --"),
        ((WRONG, RIGHT, RIGHT, RIGHT, WRONG), "2 of 5 pods differ: mend those pods: start them with the others' --"),
        ((RIGHT, WRONG), "1 of 2 pods differs, so they are not alike: start all with the same --"),
    ],
)
def test_pods_that_agree_with_the_picker_are_not_broken_by_the_fix(
    theirs: tuple[tuple[int, ...], ...], begins: str, is_chat: bool
) -> None:
    seen = of_pods(*theirs, is_chat=is_chat)
    fixes = {finding.fix for finding in (*found("tokens", seen), *found("picker-tokens", seen))}

    assert all(fix.startswith(begins) for fix in fixes), fixes
    assert not any("`chatTemplate`" in fix or "give the running picker" in fix for fix in fixes)


def test_where_all_pods_differ_the_picker_is_mended() -> None:
    seen = of_pods(WRONG, WRONG)

    assert ["`chatTemplate`" in finding.fix for finding in found("tokens", seen)] == [True, True]
    assert [finding.fix.split(" the --")[0] for finding in found("picker-tokens", seen)] == ["give the running picker"]


def test_the_running_picker_is_compared_with_every_pod() -> None:
    seen = of_pods(RIGHT, RIGHT, WRONG)

    assert lines("picker-tokens", seen) == [
        (
            "error",
            "http://p",
            "the running picker sees 2 tokens of tiny where 10.0.0.2:8000 has 3 (chat); 1 of 3 pods differs",
        )
    ]
    checks = {finding.check for finding in judge(seen) if finding.severity is Severity.OK}
    assert not checks & {"tokens", "picker-tokens"}


def test_a_pod_that_tells_no_tokens_is_not_among_those_that_agree() -> None:
    dark = pod(endpoint="10.0.0.9:8000", tokens=(compared(RIGHT, None, their_problem="/tokenize answers 404"),))
    seen = of_pods(WRONG, RIGHT)
    [_, differs, *_] = [finding.fix for finding in found("tokens", replace(seen, pods=(dark, *seen.pods)))]

    assert differs.startswith("1 of 2 pods differs")

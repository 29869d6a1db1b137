"""Tokens: the doctor shows the running picker's own verdict on its tokenizer folders and its sources of tokens."""

from typing import Any

from extproc.prompts.folder_checks import TokenState, TokenVerdict
from operate.doctor.checks import judge
from operate.doctor.facts import PickerFacts
from tests.unit.operate_doctor.doctor_facts import facts, lines


def picker(**changes: Any) -> PickerFacts:
    return PickerFacts(url="http://p", ready=True, **changes)


def test_the_pickers_verdict_on_each_folder_is_shown() -> None:
    states = {
        "tiny": TokenState(TokenVerdict.EXACT, "the same tokens of all probes as 2 pods"),
        "big": TokenState(TokenVerdict.DIFFERS, "the folder makes other tokens than 1 of 2 pods"),
        "new": TokenState(TokenVerdict.UNVERIFIED, "no pod that serves the model has reported yet"),
    }
    seen = facts(picker=picker(token_states=states))
    assert lines("picker-tokens", seen) == [
        ("error", "http://p", "tokens of big: the folder makes other tokens than 1 of 2 pods"),
        ("unchecked", "http://p", "tokens of new: no pod that serves the model has reported yet"),
    ]


def test_a_model_whose_prompts_have_no_tokens_is_a_warning() -> None:
    seen = facts(picker=picker(token_sources={"tiny": "text", "big": "pods"}))
    [(severity, _, words)] = lines("picker-tokens", seen)
    assert (severity, words) == ("warning", "prompts of tiny are routed on text only, which only predicts")


def test_a_picker_that_has_seen_no_tokens_is_not_called_right() -> None:
    def checked(seen: PickerFacts) -> bool:
        return any(finding.check == "picker-tokens" for finding in judge(facts(picker=seen)))

    assert not checked(picker())
    assert checked(picker(token_sources={"tiny": "pods"}))

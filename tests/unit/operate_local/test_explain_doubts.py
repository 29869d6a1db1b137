"""What cannot be meant in a question to `kvmesh explain` is said, and worth an exit code."""

from typing import Any

import pytest
from msgspec.structs import replace

from extproc.pages.picker_state import ClassState, DecisionState, EndpointState, PickerState, PoolState, RequestState
from operate.local.explain import doubts

REQUEST = RequestState(api="completions", served_model="qwen", prompts=1, class_name="standard", class_by="default")
POD = EndpointState(address="10.0.0.1:8000", state="ready", models=["qwen"], adapters=["lora"])
THERE = PickerState(now=1.0, endpoints=[POD], classes=[ClassState(name="critical"), ClassState(name="standard")])


def said(request: RequestState | None = REQUEST, there: PickerState = THERE, **asked: Any) -> list[tuple[str, int]]:
    """Return the words and exit codes."""
    given: dict[str, Any] = {"objective": None, "path": None, "host": None} | asked
    answer = DecisionState(endpoint="10.0.0.1:8000", request=request)
    return [(doubt.words, doubt.exit_code) for doubt in doubts(answer, there, **given)]


def test_a_plain_question_has_none() -> None:
    assert said() == []
    assert said(path="/v1/completions", objective="standard") == []
    assert said(None, objective="x") == []


@pytest.mark.parametrize(
    ("request_", "asked", "words", "code"),
    [
        (replace(REQUEST, objective_ignored="unknown"), {"objective": "gold"}, "classes are critical, standard", 2),
        (replace(REQUEST, objective_ignored="untrusted"), {"objective": "critical"}, "trustObjective", 0),
        (replace(REQUEST, api="other", prompts=0), {"path": "/v1/foo"}, "routed by load alone", 0),
        (REQUEST, {"host": "a.example"}, "this picker has one pool", 0),
        (replace(REQUEST, served_model="nope"), {}, "they serve lora, qwen", 1),
        (replace(REQUEST, adapter="nope"), {}, "no pod serves the model 'nope'", 1),
    ],
)
def test_it_is_said(request_: RequestState, asked: dict[str, Any], words: str, code: int) -> None:
    ((text, exit_code),) = said(request_, **asked)
    assert (words in text, exit_code) == (True, code)


def test_an_adapter_is_served_by_pods_that_have_it() -> None:
    assert said(replace(REQUEST, adapter="lora")) == []


def test_of_pods_that_do_not_tell_what_they_serve_nothing_is_said() -> None:
    unknown = replace(THERE, endpoints=[POD, replace(POD, models=None)])
    assert said(replace(REQUEST, served_model="nope"), unknown) == []
    assert said(replace(REQUEST, served_model="nope"), replace(THERE, endpoints=[])) == []


def test_a_host_tells_where_there_are_several_pools() -> None:
    assert said(there=replace(THERE, pools=[PoolState(pool="llm/a")]), host="a.example") == []

"""What a request may generate is lowered in the field that its API reads, and never raised."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.degradation import NO_MEASURES, measures_of
from extproc.admission.output_cap import body_changes, capped, caps
from extproc.policy.priority import DegradationStep, StepKind
from extproc.requests.json_edit import JsonObject, replace_top_level
from extproc.requests.openai import parse_request

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, GENERATE, BATCH = "/v1/messages", "/inference/v1/generate", "/v1/chat/completions/batch"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    BATCH: {"messages": [[{"role": "user", "content": "a"}]]},
    TEXT: {"prompt": "a"},
    RESPONSES: {"input": "a"},
    MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    GENERATE: {"token_ids": [1, 2]},
}
CAP = DegradationStep(step=StepKind.CAP_OUTPUT, enter=1.0, leave=0.5, tokens=200)


def changed(path: str, fields: dict[str, Any], *, tokens: int = 200) -> dict[str, Any]:
    """The fields that differ after the cap, as the pod will read them."""
    before = {**PROMPTS[path], **fields}
    plain = json.dumps(before).encode()
    changes = capped(parse_request(path=path, body=plain), JsonObject(plain), tokens=tokens)
    after = json.loads(replace_top_level(plain, changes))
    assert {name: after[name] for name in PROMPTS[path]} == PROMPTS[path]
    return {name: value for name, value in after.items() if value != before.get(name)}


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {}, {"max_tokens": 200}),
        (CHAT, {"max_tokens": 1000}, {"max_tokens": 200}),
        (CHAT, {"max_completion_tokens": 1000}, {"max_completion_tokens": 200}),
        (CHAT, {"max_completion_tokens": None}, {"max_tokens": 200}),
        (CHAT, {"max_completion_tokens": None, "max_tokens": 300}, {"max_tokens": 200}),
        (CHAT, {"max_completion_tokens": 1000, "max_tokens": 100}, {"max_completion_tokens": 200}),
        (CHAT, {"max_tokens": 1000, "n": 4}, {"max_tokens": 200}),
        (BATCH, {}, {"max_tokens": 200}),
        (TEXT, {"max_tokens": 1000}, {"max_tokens": 200}),
        (RESPONSES, {}, {"max_output_tokens": 200}),
        (RESPONSES, {"max_output_tokens": 1000, "max_tokens": 1000}, {"max_output_tokens": 200}),
        (MESSAGES, {"max_tokens": 1000}, {"max_tokens": 200}),
        (GENERATE, {"sampling_params": {"max_tokens": 1000}}, {"sampling_params": {"max_tokens": 200}}),
        (GENERATE, {"sampling_params": {"seed": 1}}, {"sampling_params": {"seed": 1, "max_tokens": 200}}),
    ],
)
def test_the_limit_that_counts_is_lowered_or_added(path: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changed(path, fields) == expected


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": 200}),
        (CHAT, {"max_tokens": 1}),
        (CHAT, {"max_completion_tokens": 100, "max_tokens": 1000}),
        (TEXT, {}),  # vLLM generates 16
        (TEXT, {"max_tokens": None}),
        (TEXT, {"max_tokens": 0, "echo": True}),
        (RESPONSES, {"max_output_tokens": 20}),
        (MESSAGES, {"max_tokens": 20}),
        (GENERATE, {"sampling_params": {"max_tokens": 20, "min_tokens": 10}}),
    ],
)
def test_a_limit_that_is_no_higher_than_the_cap_stays(path: str, fields: dict[str, Any]) -> None:
    assert changed(path, fields) == {}


def test_a_cap_below_a_completions_default_counts() -> None:
    assert changed(TEXT, {}, tokens=10) == {"max_tokens": 10}


@pytest.mark.parametrize("value", ["1000", " 1_000 ", 1000.0, "1000.0", "+1000"])
def test_a_limit_in_any_form_that_vllm_takes_is_lowered(value: object) -> None:
    assert changed(CHAT, {"max_tokens": value}) == {"max_tokens": 200}


@pytest.mark.parametrize("value", ["many", [1000], {}, 1000.5, -1, 0, float("inf"), float("nan"), "1e9999"])
def test_a_limit_that_vllm_refuses_is_left_to_it(value: object) -> None:
    plain = json.dumps({**PROMPTS[CHAT], "max_tokens": value}).encode()
    assert capped(parse_request(path=CHAT, body=plain), JsonObject(plain), tokens=200) == {}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_tokens": 500}, {"max_tokens": 200, "min_tokens": 200}),
        ({"min_tokens": 100}, {"max_tokens": 200}),
        ({"min_tokens": 500, "max_tokens": 600}, {"max_tokens": 200, "min_tokens": 200}),
    ],
)
def test_a_least_number_above_the_cap_comes_down_with_it(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changed(CHAT, fields) == expected
    assert changed(GENERATE, {"sampling_params": fields}) == {"sampling_params": {**fields, **expected}}


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}),
        (TEXT, {"structured_outputs": {"regex": "a+"}, "max_tokens": 1000}),
        (CHAT, {"tools": [FUNCTION]}),
        (CHAT, {"tools": [FUNCTION], "tool_choice": "required"}),
        (CHAT, {"tools": [FUNCTION], "tool_choice": FUNCTION}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {}}}}),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}]}),
        (MESSAGES, {"max_tokens": 1000, "tools": [{"name": "f"}], "tool_choice": {"type": "auto"}}),
        (MESSAGES, {"max_tokens": 1000, "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        (GENERATE, {"sampling_params": {"structured_outputs": {"json": "{}"}}}),
    ],
)
def test_an_answer_that_is_worth_nothing_when_it_is_cut_is_not_capped(path: str, fields: dict[str, Any]) -> None:
    assert changed(path, fields) == {}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": 1000, "response_format": {"type": "text"}, "tools": [], "structured_outputs": None}),
        (CHAT, {"max_tokens": 1000, "guided_json": {}}),  # of older vLLMs; not read any more
        (CHAT, {"max_tokens": 1000, "tools": [FUNCTION], "tool_choice": "none"}),
        (MESSAGES, {"max_tokens": 1000, "tools": [{"name": "f"}], "tool_choice": {"type": "none"}}),
        (MESSAGES, {"max_tokens": 1000, "output_config": {"effort": "low"}}),
    ],
)
def test_texts_are_capped_whatever_the_fields_that_ask_for_no_form(path: str, fields: dict[str, Any]) -> None:
    assert changed(path, fields) == {"max_tokens": 200}


def test_responses_that_set_only_a_texts_verbosity_are_capped() -> None:
    assert changed(RESPONSES, {"text": {"verbosity": "low", "format": {"type": "text"}}}) == {"max_output_tokens": 200}


@pytest.mark.parametrize(
    ("most", "budget", "cap", "expected"),
    [
        (20_000, 10_000, 2000, (4000, 2000)),
        (20_000, 10_000, 200, (1224, 1024)),  # no budget may be smaller than 1024
        (20_000, 1500, 2000, (3500, 1500)),
        (1200, 1100, 200, (1200, 1024)),
        (1100, 1024, 200, (1100, 1024)),
        (500, 2000, 200, (500, 2000)),  # refused by the pod
    ],
)
def test_a_thinking_budget_is_capped_by_itself_and_stays_below_the_limit(
    most: int, budget: int, cap: int, expected: tuple[int, int]
) -> None:
    fields = {"max_tokens": most, "thinking": {"type": "enabled", "budget_tokens": budget, "display": "omitted"}}
    after = {**fields, **changed(MESSAGES, fields, tokens=cap)}
    assert after == {
        "max_tokens": expected[0],
        "thinking": {"type": "enabled", "budget_tokens": expected[1], "display": "omitted"},
    }


def test_anthropics_limit_is_not_added_where_the_api_demands_it() -> None:
    assert changed(MESSAGES, {}) == {}


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}, None, "enabled"])
def test_thinking_without_a_budget_counts_within_the_limit(thinking: object) -> None:
    assert changed(MESSAGES, {"max_tokens": 1000, "thinking": thinking}) == {"max_tokens": 200}


def test_a_name_in_escapes_and_a_second_field_of_the_name_are_lowered_too() -> None:
    plain = rb'{"prompt":"a","max_tokens":10,"max\u005ftokens":1000, "x":NaN}'
    request = parse_request(path=TEXT, body=plain)
    changes = capped(request, JsonObject(plain), tokens=200)
    assert replace_top_level(plain, changes) == rb'{"prompt":"a","max_tokens":200,"max\u005ftokens":200, "x":NaN}'


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/v1/audio/transcriptions", "/tokenize"])
def test_apis_that_generate_nothing_or_are_unknown_pass_unchanged(path: str) -> None:
    plain = b'{"model":"m","input":"a","max_tokens":1000}'
    assert capped(parse_request(path=path, body=plain), JsonObject(plain), tokens=200) == {}


def test_a_body_that_is_not_json_is_left_to_the_pod() -> None:
    request = parse_request(path=CHAT, body=b"a=b", content_type="application/x-www-form-urlencoded")
    assert capped(request, JsonObject(b"a=b"), tokens=200) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5000) | st.floats() | st.text(max_size=5) | st.just("none"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "format"]), inner),
    max_leaves=4,
)
NAMES = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "tools", "tool_choice"),
    *("response_format", "text", "output_config", "thinking", "sampling_params", "structured_outputs"),
)


@pytest.mark.thorough
@given(path=st.sampled_from(sorted(PROMPTS)), fields=st.dictionaries(st.sampled_from(NAMES), JSON))
def test_whatever_a_client_sends_no_limit_rises_and_nothing_breaks(path: str, fields: dict[str, Any]) -> None:
    after = {**fields, **changed(path, fields)} if "max_tokens" not in fields else fields | changed(path, fields)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            assert after[name] <= value


def measures(*steps: DegradationStep) -> Any:
    return measures_of(steps)


def test_cap_and_priority_are_one_set_of_changes() -> None:
    plain = json.dumps({**PROMPTS[CHAT], "priority": 7}).encode()
    request = parse_request(path=CHAT, body=plain)
    changes = body_changes(request, JsonObject(plain), measures=measures(CAP), priority=-100)
    assert (changes, caps(changes)) == ({"max_tokens": b"200", "priority": b"100"}, True)
    changes = body_changes(request, JsonObject(plain), measures=NO_MEASURES, priority=-100)
    assert (changes, caps(changes)) == ({"priority": b"100"}, False)
    assert body_changes(request, JsonObject(plain), measures=NO_MEASURES, priority=None) == {}

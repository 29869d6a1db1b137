"""A class's priority reaches vLLM with the sign turned, over whatever the client wrote."""

import json

import pytest

from extproc.admission.output_cap import engine_priority
from extproc.errors import MalformedRequestError
from extproc.requests.json_edit import JsonObject, replace_top_level
from extproc.requests.openai import parse_request

CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "a"}]}


def sent(path: str, body: dict[str, object], *, priority: int) -> dict[str, object]:
    plain = json.dumps(body).encode()
    changes = engine_priority(parse_request(path=path, body=plain), JsonObject(plain), priority=priority)
    after: dict[str, object] = json.loads(replace_top_level(plain, changes))
    return after


@pytest.mark.parametrize(("priority", "expected"), [(100, -100), (-100, 100), (2**63, -(2**63)), (-(2**63), 2**63 - 1)])
def test_more_important_is_a_lower_number(priority: int, expected: int) -> None:
    assert sent("/v1/chat/completions", {**CHAT, "priority": -999}, priority=priority) == {**CHAT, "priority": expected}


def test_a_clients_own_priority_is_overwritten_by_an_ordinary_class() -> None:
    plain = rb'{"messages":[],"prior\u0069ty":-5,"priority":-7}'
    changes = engine_priority(parse_request(path="/v1/chat/completions", body=plain), JsonObject(plain), priority=0)
    assert replace_top_level(plain, changes) == rb'{"messages":[],"prior\u0069ty":0,"priority":0}'
    assert sent("/v1/chat/completions", {**CHAT, "priority": -5}, priority=0) == {**CHAT, "priority": 0}


def test_an_ordinary_class_changes_no_body_that_says_nothing() -> None:
    assert sent("/v1/chat/completions", CHAT, priority=0) == CHAT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/score", {"queries": "a", "documents": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_all_apis_with_the_field_get_it(path: str, body: dict[str, object]) -> None:
    assert sent(path, body, priority=10) == {**body, "priority": -10}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "m", "max_tokens": 1, **CHAT}),
        ("/tokenize", {"prompt": "a"}),
        ("/v1/anything", {"prompt": "a"}),
    ],
)
def test_apis_without_the_field_are_left_alone(path: str, body: dict[str, object]) -> None:
    assert sent(path, body, priority=10) == body


def test_a_body_of_another_application_is_left_alone() -> None:
    request = parse_request(path="/score", body=b"a=1")
    assert engine_priority(request, JsonObject(b"a=1"), priority=10) == {}


@pytest.mark.parametrize("priority", [0, 10])
@pytest.mark.parametrize("field", ["priority", "prior\u0069ty"])
def test_on_a_path_that_we_do_not_know_a_clients_own_priority_is_replaced_and_none_is_added(
    priority: int, field: str
) -> None:
    plain = b'{"%b":-9,"messages":[]}' % field.encode("ascii", "backslashreplace")
    request = parse_request(path="/cohere/v2/chat", body=plain)
    changes = engine_priority(request, JsonObject(plain), priority=priority)
    assert json.loads(replace_top_level(plain, changes)) == {"priority": -priority, "messages": []}
    assert sent("/cohere/v2/chat", {"x": {"priority": 1}}, priority=priority) == {"x": {"priority": 1}}


@pytest.mark.parametrize("priority", [0, 10])
@pytest.mark.parametrize("path", ["/v1/completions", "/score", "/cohere/v2/chat"])
@pytest.mark.parametrize("coding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_priority_that_only_the_pod_can_read_does_not_pass(path: str, coding: str, priority: int) -> None:
    plain = json.dumps({"prompt": "a", "priority": -9}).encode(coding)
    fields = JsonObject(plain)
    with pytest.raises(MalformedRequestError):
        fields.replaced(engine_priority(parse_request(path=path, body=plain), fields, priority=priority))

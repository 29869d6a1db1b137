"""The bodies that are sent, and what a salt changes in them."""

from operate.load.request_body import opening, request_of
from operate.load.script import Session, Turn

TURN = Turn(due=0.0, text="Why?", answer_tokens=7)
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def test_a_chat_is_sent_with_what_was_said_before() -> None:
    chat = Session(name="a", system="Be kind.", turns=(TURN,))
    messages = [*opening(chat, salt="Once upon"), {"role": "user", "content": "Why?"}]

    path, body = request_of(chat, TURN, messages, model="m", salt="Once upon")

    assert path == "/v1/chat/completions"
    assert body == STREAMED | {"model": "m", "temperature": 0, "max_tokens": 7, "messages": messages}
    assert messages[0] == {"role": "system", "content": "Once upon Be kind."}


def test_a_completion_begins_with_the_salt() -> None:
    lone = Session(name="a", system=None, turns=(TURN,))
    assert opening(lone, salt="Once upon") == ()
    path, body = request_of(lone, TURN, (), model="m", salt="Once upon")
    assert (path, body["prompt"]) == ("/v1/completions", "Once upon Why?")
    assert request_of(lone, TURN, (), model="m")[1]["prompt"] == "Why?"


def test_a_recorded_body_keeps_its_fields_but_streams() -> None:
    recorded = {"model": "own", "messages": [{"role": "user", "content": "hi", "name": "x"}], "top_p": 0.5, "n": 2}
    session = Session(name="a", system=None, turns=(TURN,), body=recorded)

    path, body = request_of(session, TURN, (), model="m", salt="Once")

    assert path == "/v1/chat/completions"
    assert body == STREAMED | recorded | {
        "messages": [{"role": "user", "content": "Once hi", "name": "x"}],
        "max_tokens": 7,
    }
    assert recorded["messages"] == [{"role": "user", "content": "hi", "name": "x"}]


def test_a_recorded_completion_without_a_model_is_for_the_servers() -> None:
    session = Session(name="a", system=None, turns=(TURN,), body={"prompt": "x", "max_completion_tokens": 3})
    path, body = request_of(session, TURN, (), model="m")
    assert (path, body) == ("/v1/completions", STREAMED | {"model": "m", "prompt": "x", "max_completion_tokens": 3})

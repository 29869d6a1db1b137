"""The clients of `kvmesh load`, in virtual time: they are sent when they are due, and say what they saw."""

import asyncio
from collections.abc import Sequence
from typing import Any

from bench.virtual_loop import run
from operate.load.clients import Ask, Clients
from operate.load.request_body import Message
from operate.load.script import Record, Session, Turn
from operate.load.streamed_answer import BadAnswerError, StreamedAnswer

EVENT = b'data: {"choices": [{"delta": {"content": " %s"}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}}\n\n'


def session(name: str, *dues: float, system: str | None = "Be kind.") -> Session:
    turns = tuple(Turn(due=due, text=f"question at {due:g}", answer_tokens=2) for due in dues)
    return Session(name=name, system=system, turns=turns)


def play(sessions: Sequence[Session], ask: Ask, *, salt: str = "") -> list[Record]:
    async def playing() -> list[Record]:
        clients = Clients(sessions, ask=ask, request_seconds=5.0, salt=salt, clock=asyncio.get_running_loop().time)
        await clients.run()
        assert clients.in_flight == 0
        return sorted(clients.records, key=lambda record: (record.due, record.session))

    return run(playing())


async def answer_in_two_seconds(_: Session, _turn: Turn, _messages: Sequence[Message], answer: StreamedAnswer) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1.0)
    answer.status = 200
    answer.feed(EVENT % b"one", at=loop.time())
    await asyncio.sleep(1.0)
    answer.feed(EVENT % b"two" + USAGE + b"data: [DONE]\n\n", at=loop.time())


def test_sessions_do_not_wait_for_each_other() -> None:
    records = play([session("a", 1.0), session("b", 1.5)], answer_in_two_seconds)

    assert [(round(each.sent, 6), each.error, each.refused) for each in records] == [
        (1.0, None, None),
        (1.5, None, None),
    ]
    assert [(each.answer, each.prompt_tokens, each.cached_tokens) for each in records] == [(" one two", 40, 32)] * 2
    assert [round(each.ttft_ms or 0.0) for each in records] == [1000, 1000]
    assert [[round(gap, 6) for gap in each.gaps] for each in records] == [[1.0], [1.0]]


def test_a_question_waits_for_the_answer_before_and_brings_it_along() -> None:
    asked: list[Sequence[Message]] = []

    async def ask(each: Session, turn: Turn, messages: Sequence[Message], answer: StreamedAnswer) -> None:
        asked.append(messages)
        await answer_in_two_seconds(each, turn, messages, answer)

    first, second = play([session("a", 0.0, 0.5)], ask, salt="Once upon")

    assert (round(second.ready, 6), round(second.sent, 6), second.due) == (2.0, 2.0, 0.5)
    assert first.ready == first.due == 0.0
    assert [[message["content"] for message in messages] for messages in asked] == [
        ["Once upon Be kind.", "question at 0"],
        ["Once upon Be kind.", "question at 0", " one two", "question at 0.5"],
    ]


def failing(error: Exception | None = None, **answered: Any) -> Ask:
    async def ask(_: Session, _turn: Turn, _messages: Sequence[Message], answer: StreamedAnswer) -> None:
        for name, value in answered.items():
            setattr(answer, name, value)
        if error is not None:
            raise error

    return ask


async def never(_: Session, _turn: Turn, _messages: Sequence[Message], _answer: StreamedAnswer) -> None:
    await asyncio.sleep(1000.0)


def test_what_goes_wrong_is_told_and_the_session_goes_on_without_it() -> None:
    def told(ask: Ask) -> tuple[str | None, str | None]:
        record, after = play([session("a", 0.0, 100.0)], ask)
        assert (record.error, record.refused, record.ttft_ms) == (after.error, after.refused, None)
        return record.error, record.refused

    assert told(failing(BadAnswerError("the answer broke off"))) == ("the answer broke off", None)
    assert told(failing(ConnectionResetError("gone"))) == ("ConnectionResetError: gone", None)
    assert told(failing(status=200)) == ("the answer broke off", None)
    assert told(failing(status=500, refusal='{"error": {"message": "no  more\\nmemory"}}')) == (
        "status 500: no more memory",
        None,
    )
    assert told(failing(status=503, headers={"x-kvmesh-reason": "overload"})) == (None, "overload")
    assert told(never) == ("no whole answer within 5 s", None)


def test_a_cancelled_run_keeps_what_has_ended() -> None:
    async def playing() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        sessions = [session("a", 0.0), session("b", 4.0)]
        clients = Clients(sessions, ask=answer_in_two_seconds, request_seconds=9.0, clock=loop.time)
        running = asyncio.create_task(clients.run())
        await asyncio.sleep(5.0)
        running.cancel()
        await asyncio.wait({running})
        return len(clients.records), clients.in_flight

    assert run(playing()) == (1, 1)

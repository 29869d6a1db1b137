"""The clients of the overload benchmark, in virtual time: they do not wait for each other, and some come back."""

import asyncio
from collections.abc import Sequence

from bench.overload.load import Ask, Clients
from bench.overload.refusable_http import Answer
from bench.overload.script import Job, Outcome, Request
from bench.virtual_loop import run
from operate.load.streamed_answer import BadAnswerError


def request(number: int, *, due: float, obeys: bool = True) -> Request:
    return Request(
        number=number,
        due=due,
        tenant="steady",
        class_name="standard",
        prompt="a b",
        work_tokens=2,
        answer_tokens=3,
        obeys=obeys,
    )


def play(requests: Sequence[Request], ask: Ask) -> list[Outcome]:
    job = Job(host="", port=0, model="tiny", requests=tuple(requests), patience_seconds=5.0, most_attempts=3)

    async def playing() -> list[Outcome]:
        clients = Clients(job, ask=ask, clock=asyncio.get_running_loop().time)
        await clients.run()
        return sorted(clients.outcomes, key=lambda each: each.due)

    return run(playing())


async def answer_after_two_seconds(_: Request, answer: Answer) -> None:
    await asyncio.sleep(2.0)
    answer.status, answer.first_at, answer.pieces, answer.done = 200, asyncio.get_running_loop().time(), 3, True


def refusing(headers: dict[str, str], *, times: int) -> Ask:
    left = times

    async def ask(asked: Request, answer: Answer) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            await answer_after_two_seconds(asked, answer)
        else:
            answer.status, answer.headers = 503, {"x-kvmesh-reason": "overload"} | headers

    return ask


def test_requests_are_sent_when_they_are_due_though_others_still_wait() -> None:
    outcomes = play([request(0, due=1.0), request(1, due=1.5)], answer_after_two_seconds)

    assert [round(each.last.sent, 6) for each in outcomes] == [1.0, 1.5]
    assert [each.last.ttft and round(each.last.ttft, 6) for each in outcomes] == [2.0, 2.0]


def test_a_client_that_obeys_comes_back_when_it_was_told() -> None:
    (outcome,) = play([request(0, due=0.0)], refusing({"retry-after": "3"}, times=1))

    assert [round(attempt.sent, 6) for attempt in outcome.attempts] == [0.0, 3.0]
    assert [(attempt.status, attempt.reason) for attempt in outcome.attempts] == [(503, "overload"), (200, "")]


def test_milliseconds_are_read_before_seconds() -> None:
    (outcome,) = play([request(0, due=0.0)], refusing({"retry-after": "3", "retry-after-ms": "2250"}, times=1))

    assert outcome.attempts[0].retry_after == 2.25


def test_nobody_comes_back_without_being_told_when_or_more_often_than_allowed_or_who_does_not_obey() -> None:
    (untold,) = play([request(0, due=0.0)], refusing({}, times=1))
    (patient,) = play([request(0, due=0.0)], refusing({"retry-after": "1"}, times=9))
    (stubborn,) = play([request(0, due=0.0, obeys=False)], refusing({"retry-after": "1"}, times=1))

    assert [len(each.attempts) for each in (untold, patient, stubborn)] == [1, 3, 1]


def test_a_client_leaves_when_its_patience_is_over() -> None:
    async def never(_: Request, answer: Answer) -> None:
        answer.status = 200
        await asyncio.sleep(1000)

    (outcome,) = play([request(0, due=0.0)], never)

    assert (round(outcome.last.ended, 6), outcome.last.error) == (5.0, "no whole answer within 5 s")


def test_a_broken_answer_is_an_error_and_no_refusal() -> None:
    async def breaks(_: Request, answer: Answer) -> None:
        answer.status = 200
        raise BadAnswerError("the stream ended before [DONE]")

    (outcome,) = play([request(0, due=0.0)], breaks)

    assert (outcome.last.error, outcome.last.ttft, outcome.last.is_refused) == (
        "BadAnswerError: the stream ended before [DONE]",
        None,
        False,
    )

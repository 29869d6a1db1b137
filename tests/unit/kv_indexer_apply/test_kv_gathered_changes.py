"""Changes of several streams: in one call if they come in one turn, and each with its own end."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hiredis import ReplyError

from kv_indexer.apply.batches import BLOCKS_A_CHANGE
from kv_indexer.apply.gathered_changes import GatheredChanges
from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.protocol import Argument


class Script:
    """Answers each change with its first argument, once it may."""

    def __init__(self) -> None:
        self.calls: list[list[Argument]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.lacks = 0  # answers too few

    async def __call__(self, *arguments: Argument) -> Any:
        self.calls.append(list(arguments))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        answers: list[Any] = []
        at = 0
        while at < len(arguments):
            count, first = int(arguments[at]), arguments[at + 1]
            answers.append(ReplyError("ERR broken") if first == "broken" else [first])
            at += count + 1
        return answers[self.lacks :]


async def results(changes: GatheredChanges, *firsts: str, cost: int = 1) -> Sequence[Any]:
    writes = [changes.write([first, "more"], cost=cost) for first in firsts]
    return await asyncio.gather(*writes, return_exceptions=True)


async def called(script: Script, times: int = 1) -> None:
    while len(script.calls) < times:
        await asyncio.sleep(0)


@pytest.fixture
async def script() -> Script:
    return Script()


async def test_the_changes_of_one_turn_are_one_call(script: Script) -> None:
    assert await results(GatheredChanges(script), "a", "b", "c") == [["a"], ["b"], ["c"]]
    assert sorted(map(str, script.calls[0])) == sorted(map(str, [2, "a", "more", 2, "b", "more", 2, "c", "more"]))
    assert len(script.calls) == 1


async def test_a_change_of_a_later_turn_does_not_wait_for_the_answer_to_an_earlier_one(script: Script) -> None:
    changes = GatheredChanges(script)
    script.may_answer.clear()
    first = asyncio.create_task(results(changes, "a", "b"))
    await called(script)
    second = asyncio.create_task(results(changes, "c"))
    await called(script, 2)
    script.may_answer.set()

    assert (await first, await second) == ([["a"], ["b"]], [["c"]])


async def test_large_changes_are_calls_of_their_own(script: Script) -> None:
    assert await results(GatheredChanges(script), "a", "b", cost=BLOCKS_A_CHANGE) == [["a"], ["b"]]
    assert len(script.calls) == 2


async def test_a_change_that_redis_refuses_fails_alone(script: Script) -> None:
    one, broken, other = await results(GatheredChanges(script), "a", "broken", "b")

    assert (one, other) == (["a"], ["b"])
    assert isinstance(broken, IndexUnavailableError)


@pytest.mark.parametrize("firsts", [("a",), ("a", "b")], ids=["alone", "together"])
async def test_a_failed_call_and_a_strange_answer_are_an_error_of_each(script: Script, firsts: Sequence[str]) -> None:
    changes = GatheredChanges(script)
    script.lacks = 1
    strange = await results(changes, *firsts)
    script.error = IndexUnavailableError("gone")
    failed = await results(changes, *firsts)

    assert all(isinstance(each, IndexUnavailableError) for each in (*strange, *failed))


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_a_cancelled_change_takes_no_other_along(script: Script, gone: int) -> None:
    changes = GatheredChanges(script)
    tasks = [asyncio.create_task(changes.write([first], cost=1)) for first in ("a", "b", "c")]
    await asyncio.sleep(0)
    tasks[gone].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(done.pop(gone), asyncio.CancelledError)
    assert done == [[first] for number, first in enumerate("abc") if number != gone]
    assert len(script.calls) == 1
    await changes.close()


async def test_closing_waits_for_the_calls_under_way(script: Script) -> None:
    changes = GatheredChanges(script)
    script.may_answer.clear()
    writing = asyncio.create_task(results(changes, "a", "b"))
    await called(script)
    closing = asyncio.create_task(changes.close())
    await asyncio.sleep(0)
    assert not closing.done()
    script.may_answer.set()
    await closing

    assert await writing == [["a"], ["b"]]

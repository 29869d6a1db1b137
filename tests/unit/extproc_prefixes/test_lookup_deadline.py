"""A lookup ends when its time is over and no answer lies unread; whatever else cancels it is not taken for that."""

import asyncio
import socket
import time

import pytest

from extproc.prefixes.prefix_index import LookupDeadlines

SECONDS = 0.01


async def test_what_takes_too_long_ends_with_a_timeout() -> None:
    deadlines = LookupDeadlines(SECONDS)
    began = time.monotonic()
    with pytest.raises(TimeoutError), deadlines():
        await asyncio.Event().wait()
    assert time.monotonic() - began >= SECONDS


async def test_what_is_done_in_time_is_left_alone() -> None:
    deadlines = LookupDeadlines(SECONDS)
    with deadlines():
        await asyncio.sleep(0)
    # the first one's time is over before that
    with pytest.raises(TimeoutError), deadlines():
        await asyncio.Event().wait()


async def test_an_answer_that_came_while_the_loop_was_busy_counts() -> None:
    deadlines = LookupDeadlines(SECONDS)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        with deadlines():
            theirs.send(b"answer")
            waiting = asyncio.ensure_future(reader.readexactly(6))
            await asyncio.sleep(0)
            until = time.monotonic() + 2 * SECONDS
            while time.monotonic() < until:  # the loop does something else
                pass
            assert await waiting == b"answer"
        writer.close()


async def test_each_of_many_has_its_own_time() -> None:
    deadlines = LookupDeadlines(SECONDS)
    done: list[int] = []

    async def lookup(number: int) -> None:
        try:
            with deadlines():
                await (asyncio.sleep(0) if number % 2 else asyncio.Event().wait())
        except TimeoutError:
            done.append(number)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(lookup(number), name=f"lookup {number}")
    assert done == [0, 2, 4]


async def test_a_cancelled_lookup_stays_cancelled() -> None:
    deadlines = LookupDeadlines(SECONDS)
    begun = asyncio.Event()

    async def lookup() -> None:
        with deadlines():
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(lookup(), name="lookup")
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_lookup_that_is_cancelled_in_the_moment_of_its_end_stays_cancelled() -> None:
    deadlines = LookupDeadlines(SECONDS)

    async def lookup() -> None:
        with deadlines() as deadline:
            try:
                await asyncio.Event().wait()
            finally:
                assert deadline.is_late
                task.cancel()

    task = asyncio.create_task(lookup(), name="lookup")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_lookup_passes_as_it_is() -> None:
    deadlines = LookupDeadlines(SECONDS)
    with pytest.raises(ValueError, match="its own"), deadlines():
        raise ValueError("its own")

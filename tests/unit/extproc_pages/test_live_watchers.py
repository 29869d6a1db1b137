"""What waits for one who watches, and how bursts are thinned out."""

import asyncio

import msgspec

from extproc.pages.live_watchers import EVENTS_PER_SECOND, MOST_WAITING_BYTES, Coalesced, EventNumbers, Watcher


def bye(why: str) -> bytes:
    return f"bye {why}".encode()


async def test_what_was_pushed_is_read_in_order_and_at_once() -> None:
    watcher = Watcher(bye)

    watcher.push(b"one")
    watcher.push(b"two")

    assert await watcher.next(within_seconds=1.0) == b"onetwo"
    assert await watcher.next(within_seconds=0.0) == b""


async def test_who_waits_is_woken() -> None:
    watcher = Watcher(bye)
    waiting = asyncio.create_task(watcher.next(within_seconds=10.0))
    await asyncio.sleep(0)

    watcher.push(b"one")

    assert await waiting == b"one"


async def test_a_slow_reader_is_told_so_in_place_of_all_that_waits_and_gets_nothing_more() -> None:
    watcher = Watcher(bye)
    watcher.push(b"x" * MOST_WAITING_BYTES)

    watcher.push(b"y")
    watcher.push(b"z")

    assert watcher.ended == "slow-reader"
    assert not watcher.is_over
    assert await watcher.next(within_seconds=1.0) == b"bye slow-reader"
    assert watcher.is_over


async def test_one_who_has_read_all_gets_the_next_event_however_long_it_is() -> None:
    watcher = Watcher(bye)

    watcher.push(b"x" * (MOST_WAITING_BYTES + 1))  # a snapshot of a thousand pods

    assert watcher.ended is None
    assert len(await watcher.next(within_seconds=1.0)) == MOST_WAITING_BYTES + 1


async def test_the_first_word_of_farewell_counts() -> None:
    watcher = Watcher(bye)

    watcher.end("shutdown")
    watcher.end("pool-gone")

    assert (watcher.ended, await watcher.next(within_seconds=1.0)) == ("shutdown", b"bye shutdown")


def test_events_are_numbered_and_their_data_is_one_line() -> None:
    numbers = EventNumbers()

    assert numbers.event("pods", {"text": "a\nb\r\ndata: c"}) == (
        b'id: 1\nevent: pods\ndata: {"text":"a\\nb\\r\\ndata: c"}\n\n'
    )
    assert numbers.event("index", {}) == b"id: 2\nevent: index\ndata: {}\n\n"


def test_text_that_is_no_unicode_does_not_end_the_feed() -> None:
    assert EventNumbers().event("decision", {"path": "\ud800"}) == (
        b'id: 1\nevent: decision\ndata: {"path": "\\ud800"}\n\n'
    )


class Event(msgspec.Struct, frozen=True):
    number: int
    missed: int = 0


def offered(burst: Coalesced[Event], numbers: range, *, now: float) -> list[Event]:
    found = (burst.offer(lambda number=number: Event(number), now=now) for number in numbers)  # type: ignore[misc]
    return [data for data in found if data is not None]


def test_a_burst_passes_up_to_its_limit_and_the_next_second_says_how_many_were_left_out() -> None:
    burst = Coalesced[Event]()

    passed = offered(burst, range(50), now=10.0)
    later = offered(burst, range(50, 52), now=11.0)

    assert passed == [Event(n) for n in range(EVENTS_PER_SECOND)]
    assert later == [Event(50, missed=30), Event(51)]


def test_the_newest_of_a_burst_comes_although_nothing_follows_and_once() -> None:
    burst = Coalesced[Event]()
    offered(burst, range(50), now=10.0)

    assert burst.flush(now=10.5) is None
    assert burst.flush(now=11.0) == Event(49, missed=29)
    assert burst.flush(now=12.0) is None


def test_a_second_has_no_more_than_its_limit_also_after_a_flush() -> None:
    burst = Coalesced[Event]()
    offered(burst, range(50), now=10.0)
    burst.flush(now=11.0)

    assert len(offered(burst, range(50), now=11.5)) == EVENTS_PER_SECOND - 1

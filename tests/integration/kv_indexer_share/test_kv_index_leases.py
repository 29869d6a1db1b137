"""Who may write: leases, fences, takeover and sharing; run against Redis and against its in-memory twin."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmesh.blocks.source import Claim, SourceState, Stream, StreamPosition
from kvmesh.errors import LeaseLostError
from tests.integration.kv_index import A1, A, B, Index, blocks, change, memory_index, redis_index


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    opened = memory_index() if request.param == "memory" else redis_index(request.getfixturevalue("redis_server"))
    async with opened as one:
        yield one


async def write_with(index: Index, claim: Claim, epoch: int) -> list[str]:
    """Try all that writes; return what was refused."""
    position = await index.writer.read_position(claim.stream) or StreamPosition(epoch=epoch)
    attempts = {
        "apply": index.writer.apply(claim, change(position, blocks(5, 5))),
        "begin": index.writer.begin_epoch(claim, expected_epoch=position.epoch, last_seq=-1, degraded=""),
        "state": index.writer.set_state(claim, epoch=position.epoch, state=SourceState.LOST),
        "start": index.writer.set_started_at(claim, started_at=1.0),
    }
    refused = []
    for name, attempt in attempts.items():
        try:
            await attempt
        except LeaseLostError:
            refused.append(name)
    return refused


ALL = ["apply", "begin", "state", "start"]


async def test_a_writer_whose_stream_another_has_taken_changes_nothing(index: Index) -> None:
    late, next_one = index.lease_book("late"), index.lease_book("next")
    old = (await late.tick({A}))[A]
    assert await index.writer.apply(old, change(await position_of(index, A), blocks(1, 2))) is not None
    await index.pass_time(2.5)
    new = (await next_one.tick({A}))[A]
    await index.believe(new)
    before = await position_of(index, A)

    assert new.fence > old.fence
    assert await write_with(index, old, before.epoch) == ALL
    assert (await position_of(index, A), await index.matched()) == (before, {A.endpoint: 2})
    assert await late.tick({A}) == {}
    assert await write_with(index, new, before.epoch) == []
    await close(index, late, next_one)


async def test_a_stream_that_another_has_taken_is_not_dropped_by_whoever_had_it(index: Index) -> None:
    late, next_one = index.lease_book("late"), index.lease_book("next")
    old = (await late.tick({A}))[A]
    await index.pass_time(2.5)
    new = (await next_one.tick({A}))[A]
    assert await index.writer.apply(new, change(await position_of(index, A), blocks(1, 2))) is not None
    await index.believe(new)

    with pytest.raises(LeaseLostError):
        await late.drop(old)
    assert await index.matched() == {A.endpoint: 2}
    await next_one.drop(new)
    assert (await index.matched(), await index.writer.read_position(A)) == ({}, None)
    await close(index, late, next_one)


async def test_a_lease_that_has_run_out_is_void_even_if_nobody_took_the_stream(index: Index) -> None:
    book = index.lease_book("only")
    old = (await book.tick({A}))[A]
    await index.pass_time(2.5)
    assert await write_with(index, old, 1) == ALL

    new = (await book.tick({A}))[A]
    assert new.fence > old.fence
    assert await write_with(index, old, 1) == ALL
    assert await write_with(index, new, 1) == []
    await close(index, book)


async def test_a_stream_that_the_index_does_not_know_cannot_be_written(index: Index) -> None:
    assert await write_with(index, Claim(stream=B, fence=1), 1) == ALL
    await index.claim(B)
    assert await write_with(index, Claim(stream=B, fence=0), 1) == ALL
    await index.drop(B)
    assert await write_with(index, Claim(stream=B, fence=1), 1) == ALL


async def test_renewing_keeps_the_fence_and_the_position(index: Index) -> None:
    book = index.lease_book("one")
    first = await book.tick({A, B})
    assert await index.writer.apply(first[A], change(await position_of(index, A), blocks(1, 2))) is not None
    for _ in range(4):
        await index.pass_time(1.5)
        assert await book.tick({A, B}) == first
    assert (await position_of(index, A)).last_seq == 0
    assert [(line.owner, line.events) for line in await index.reader.sources()] == [("one", 1), ("one", 0)]
    await close(index, book)


async def test_nothing_is_given_to_one_that_has_its_share_in_streams_that_the_giver_could_not_follow(
    index: Index,
) -> None:
    one, two, three, four = (Stream(endpoint=f"10.0.3.{number}:8000") for number in range(1, 5))
    giver, full, hungry = index.lease_book("giver"), index.lease_book("full"), index.lease_book("hungry")
    assert (await giver.tick({one, two})).keys() == {one, two}
    assert (await full.tick({one, two, three, four})).keys() == {three, four}
    assert await hungry.tick({three, four}) == {}
    # it would not take it, nor could the hungry one: nobody would follow the stream for a second
    assert (await giver.tick({one, two})).keys() == {one, two}
    await close(index, giver, full, hungry)


async def test_two_indexers_share_the_streams_and_the_second_gets_its_part(index: Index) -> None:
    streams = {Stream(endpoint=f"10.0.2.{number}:8000") for number in range(5)}
    one, two = index.lease_book("one"), index.lease_book("two")
    assert (await one.tick(streams)).keys() == streams
    held = [0, 0]
    for _ in range(3):
        await index.pass_time(0.5)
        first, second = await one.tick(streams), await two.tick(streams)
        held = [len(first), len(second)]
        assert not first.keys() & second.keys()
    assert sorted(held) == [2, 3]

    before = (first, second)
    await index.pass_time(0.5)
    assert (await one.tick(streams), await two.tick(streams)) == before  # at rest
    await close(index, one, two)


async def test_a_silent_indexers_streams_pass_to_another_within_the_lease_and_a_beat(index: Index) -> None:
    streams = {Stream(endpoint=f"10.0.2.{number}:8000") for number in range(4)}
    one, two = index.lease_book("one"), index.lease_book("two")
    await two.tick(streams)
    await one.tick(streams)
    for _ in range(2):
        held = await two.tick(streams)
        await one.tick(streams)
    assert len(held) == 2
    for _ in range(5):  # `one` says no more
        await index.pass_time(0.5)
        held = await two.tick(streams)
    assert held.keys() == streams
    await close(index, one, two)


async def test_an_indexer_that_ends_gives_its_streams_back_at_once(index: Index) -> None:
    one, two = index.lease_book("one"), index.lease_book("two")
    old = await one.tick({A, B})
    await two.tick({A, B})
    await one.release()
    assert await write_with(index, old[A], 1) == ALL

    assert (await two.tick({A, B})).keys() == {A, B}
    await one.release()
    assert (await two.tick({A, B})).keys() == {A, B}
    await close(index, one, two)


async def test_a_stream_that_only_one_of_two_indexers_reaches_is_followed_by_that_one(index: Index) -> None:
    one, two = index.lease_book("one", endpoints=(A.endpoint, B.endpoint)), index.lease_book("two")
    for _ in range(4):
        first, second = await one.tick({A}), await two.tick({A1, B})
    assert (first.keys(), second.keys()) == ({A}, {A1, B})
    await close(index, one, two)


async def test_a_stream_that_is_a_candidate_no_more_is_given_back_and_kept(index: Index) -> None:
    book = index.lease_book("one", endpoints=(A.endpoint,))
    claims = await book.tick({A, A1})
    await index.writer.apply(claims[A], change(await position_of(index, A), blocks(1, 2)))
    before = await position_of(index, A)
    assert (await book.tick({A1})).keys() == {A1}
    assert await position_of(index, A) == before
    assert [line.owner for line in await index.reader.sources()] == ["", "one"]

    await index.pass_time(1.5)
    await book.tick({A1})
    assert [(line.state, line.reason) for line in await index.reader.sources()] == [
        (SourceState.LOST, "not-followed"),
        (SourceState.REPLAYING, ""),
    ]
    await close(index, book)


async def test_a_silent_indexers_streams_do_not_count_and_another_takes_them_before_their_lease_ends(
    index: Index,
) -> None:
    dead, heir = index.lease_book("dead", lease_seconds=10.0), index.lease_book("heir", lease_seconds=10.0)
    claims = await dead.tick({A})
    await index.writer.apply(claims[A], change(await position_of(index, A), blocks(1, 2)))
    await index.believe(claims[A])
    assert (await heir.tick({A}), await heir.pulse(), await index.matched()) == ({}, set(), {A.endpoint: 2})

    await index.pass_time(3.5)

    assert (await heir.pulse(), await look_anew(index)) == ({"dead"}, {})
    new = (await heir.tick({A}))[A]
    assert new.fence > claims[A].fence
    await index.believe(new)
    assert (await index.matched(), await write_with(index, claims[A], 1)) == ({A.endpoint: 2}, ALL)
    await close(index, dead, heir)


async def test_an_indexer_that_was_silent_goes_on_with_what_nobody_took(index: Index) -> None:
    book, other = index.lease_book("book", lease_seconds=10.0), index.lease_book("other", lease_seconds=10.0)
    claims = await book.tick({A})
    await index.pass_time(3.5)
    assert await other.pulse() == {"book"}

    assert await book.pulse() == set()
    assert (await other.pulse(), await book.tick({A})) == (set(), claims)
    await close(index, book, other)


async def test_streams_whose_endpoint_nobody_lists_are_dropped_once_their_indexer_is_forgotten(index: Index) -> None:
    one, two = index.lease_book("one"), index.lease_book("two")
    claims = await one.tick({A})
    await index.writer.apply(claims[A], change(await position_of(index, A), blocks(1, 2)))
    await two.tick({B})
    for _ in range(6):  # `one` says no more, but it may come back
        await index.pass_time(1.0)
        await two.tick({B})
    assert [(line.endpoint, line.cached_blocks) for line in await index.reader.sources()] == [
        (A.endpoint, 2),
        (B.endpoint, 0),
    ]

    await index.pass_time(1.5)
    await two.tick({B})
    assert await index.matched() == {}
    assert [line.endpoint for line in await index.reader.sources()] == [B.endpoint]
    await close(index, one, two)


async def test_fences_grow_whoever_takes_whichever_stream(index: Index) -> None:
    books, fences = [index.lease_book(f"indexer-{number}") for number in range(3)], []
    for round_ in range(6):
        claims = await books[round_ % 3].tick({A, B})
        fences += sorted(claim.fence for claim in claims.values())
        await index.pass_time(4.0)
    assert (len(fences), sorted(set(fences))) == (12, fences)
    await close(index, *books)


async def position_of(index: Index, stream: Stream) -> StreamPosition:
    position: StreamPosition = await index.writer.read_position(stream)
    return position


async def look_anew(index: Index) -> dict[str, int]:
    """What a reader matches that does not go by what it read a moment ago."""
    await index.reader.sources()
    return await index.matched()


async def close(index: Index, *books: Any) -> None:
    if index.redis is not None:
        for book in books:
            await book.close()

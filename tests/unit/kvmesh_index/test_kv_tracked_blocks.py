"""What is kept of prefixes that come again: never anything that Redis has told to be different."""

import random
from collections.abc import Sequence

import pytest

from kvmesh.index.prefix_match import Run, runs_of
from kvmesh.index.tracking_link import CHUNK_BLOCKS, TrackedBlocks, TrackedChunk

KEY = 8
HELD = b"3"


def prompt(blocks: int, *, branch: int = 0, shared: int = 0) -> bytes:
    """Return packed keys; the first `shared` blocks are those of branch 0."""
    keys = range(1, blocks + 1)
    return b"".join((key if key <= shared else branch << 32 | key).to_bytes(KEY, "little") for key in keys)


def keys_of(packed: bytes) -> list[bytes]:
    return [packed[at : at + KEY] for at in range(0, len(packed), KEY)]


def values(runs: Sequence[Run]) -> list[bytes | None]:
    return [value for value, count in runs for _ in range(count)]


def answer(tracked: TrackedBlocks, *, value: bytes = HELD) -> Sequence[TrackedChunk]:
    """Have Redis answer all that is wanted."""
    chunks = tracked.take_wanted(1000)
    for chunk in chunks:
        tracked.fill(chunk, [value] * CHUNK_BLOCKS)
    return chunks


def filled(*prompts: bytes, limit: int = 100) -> TrackedBlocks:
    tracked = TrackedBlocks(limit=limit)
    for keys in prompts:
        for _ in range(2):
            tracked.note(keys, held=len(keys) // KEY)
    answer(tracked)
    return tracked


def test_a_chunk_is_wanted_when_it_is_held_for_the_second_time() -> None:
    tracked, keys = TrackedBlocks(), prompt(200)

    assert tracked.note(keys, held=130) is False
    assert tracked.note(keys, held=100) is True  # the first chunk only
    assert [chunk.keys for chunk in tracked.take_wanted(10)] == [keys[: 64 * KEY]]
    assert tracked.note(keys, held=130) is True  # now the second
    assert [chunk.keys for chunk in tracked.take_wanted(10)] == [keys[64 * KEY : 128 * KEY]]
    assert tracked.note(keys, held=130) is False  # both are asked for


def test_what_was_answered_is_known_from_the_beginning_on() -> None:
    keys = prompt(200)
    tracked = TrackedBlocks()
    for _ in range(2):
        tracked.note(keys, held=200)
    assert tracked.leading(keys) == ((), 0)  # wanted is not known
    first, second, third = tracked.take_wanted(10)

    tracked.fill(second, [b"2"] * 64)
    assert tracked.leading(keys) == ((), 0)
    tracked.fill(first, [b"1"] * 60 + [b"2"] * 4)
    assert tracked.leading(keys) == ([(b"1", 60), (b"2", 68)], 128)
    assert tracked.leading(keys[: 100 * KEY]) == ([(b"1", 60), (b"2", 4)], 64)
    assert tracked.leading(keys[: 63 * KEY]) == ((), 0)
    tracked.fill(third, [None] * 64)
    assert tracked.leading(keys) == ([(b"1", 60), (b"2", 68), (None, 64)], 192)


def test_a_change_takes_its_chunk_out_and_hides_what_follows() -> None:
    keys = prompt(192)
    tracked = filled(keys)
    assert tracked.leading(keys)[1] == 192

    tracked.changed([keys_of(keys)[70]])
    assert tracked.leading(keys) == ([(HELD, 64)], 64)
    tracked.changed([keys_of(keys)[70], b"stranger", keys_of(keys)[71]])  # told twice, or of nothing of ours
    assert len(tracked) == 128

    for _ in range(2):
        tracked.note(keys, held=192)
    answer(tracked, value=b"4")
    assert tracked.leading(keys) == ([(HELD, 64), (b"4", 64), (HELD, 64)], 192)


def test_prompts_that_part_within_a_chunk_are_told_of_both() -> None:
    one, other, third = prompt(128), prompt(128, branch=1, shared=100), prompt(128, branch=2, shared=70)
    tracked = filled(one, other, third)
    assert [tracked.leading(keys)[1] for keys in (one, other, third)] == [128, 128, 128]

    tracked.changed([keys_of(one)[110]])
    assert [tracked.leading(keys)[1] for keys in (one, other, third)] == [64, 128, 128]
    tracked.changed([keys_of(one)[80]])
    assert [tracked.leading(keys)[1] for keys in (one, other, third)] == [64, 64, 128]
    tracked.changed([keys_of(one)[3]])
    assert [tracked.leading(keys)[1] for keys in (one, other, third)] == [0, 0, 0]


def test_a_change_before_the_answer_makes_the_answer_void() -> None:
    keys = prompt(64)
    tracked = TrackedBlocks()
    for _ in range(2):
        tracked.note(keys, held=64)
    (chunk,) = tracked.take_wanted(10)

    tracked.changed([keys_of(keys)[5]])
    tracked.fill(chunk, [HELD] * 64)

    assert tracked.leading(keys) == ((), 0)
    assert len(tracked) == 0


def test_a_change_before_it_is_asked_for_leaves_nothing_to_ask() -> None:
    keys = prompt(64)
    tracked = TrackedBlocks()
    for _ in range(2):
        tracked.note(keys, held=64)
    tracked.changed(keys_of(keys))
    assert tracked.take_wanted(10) == []


def test_clearing_forgets_all_and_voids_what_is_under_way() -> None:
    keys, other = prompt(64), prompt(64, branch=1)
    tracked = filled(keys)
    for _ in range(2):
        tracked.note(other, held=64)
    under_way = tracked.take_wanted(10)
    for _ in range(2):
        tracked.note(prompt(64, branch=2), held=64)

    tracked.clear()
    tracked.fill(under_way[0], [HELD] * 64)

    assert (tracked.leading(keys), tracked.leading(other), len(tracked)) == (((), 0), ((), 0), 0)
    assert tracked.take_wanted(10) == []


def test_who_is_not_used_goes_first() -> None:
    used, unused, new = prompt(64), prompt(64, branch=1), prompt(64, branch=2)
    tracked = filled(used, unused, limit=2)
    tracked.note(used, held=64)

    for _ in range(2):
        tracked.note(new, held=64)
    answer(tracked)

    assert [tracked.leading(keys)[1] for keys in (used, unused, new)] == [64, 0, 64]
    assert len(tracked) == 128


def test_a_very_long_prompt_is_begun_with_in_parts() -> None:
    keys = prompt(64 * 40)
    tracked = TrackedBlocks(limit=100)
    sizes = []
    for _ in range(5):
        tracked.note(keys, held=64 * 40)
        sizes.append(len(tracked) // 64)
        answer(tracked)
    assert sizes == [0, 16, 32, 40, 40]
    assert tracked.leading(keys)[1] == 64 * 40


def test_values_that_alternate_are_known_and_not_kept_together() -> None:
    keys = prompt(64 * 10)
    tracked = TrackedBlocks()
    for _ in range(2):
        tracked.note(keys, held=64 * 10)
    chunks = tracked.take_wanted(10)
    for chunk in chunks:
        tracked.fill(chunk, [b"1", b"2"] * 32)
    runs, known = tracked.leading(keys)
    assert (values(runs), known) == ([b"1", b"2"] * 320, 640)
    assert sum(len(chunk.so_far) for chunk in chunks) == 0


def test_nothing_piles_up_while_nobody_answers() -> None:
    tracked = TrackedBlocks(limit=3)
    for branch in range(20):
        for _ in range(2):
            tracked.note(prompt(64, branch=branch), held=64)
    assert len(tracked) == 3 * 64
    assert [chunk.keys for chunk in tracked.take_wanted(100)] == [prompt(64, branch=each) for each in (17, 18, 19)]
    assert tracked.take_wanted(100) == []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_what_is_known_is_what_redis_has(seed: int) -> None:
    chance = random.Random(seed)
    prompts = [prompt(320), prompt(320, branch=1, shared=128), prompt(320, branch=2, shared=200)]
    redis: dict[bytes, bytes] = {key: HELD for keys in prompts for key in keys_of(keys)}
    tracked = TrackedBlocks(limit=6)
    under_way: list[tuple[TrackedChunk, list[bytes | None]]] = []  # as Redis answered, not read yet
    known = 0
    for _ in range(400):
        match chance.randrange(6):
            case 0 | 1:
                tracked.note(chance.choice(prompts), held=chance.randrange(321))
            case 2:
                under_way += [
                    (each, [redis.get(key) for key in each.blocks()]) for each in tracked.take_wanted(2)
                ]  # a change from here on is told before the answer is read
            case 3:
                for chunk, told in under_way:
                    tracked.fill(chunk, told)
                under_way.clear()
            case 4 if chance.random() < 0.3:
                changed = chance.sample(keys_of(chance.choice(prompts)), chance.randrange(1, 5))
                redis.update(dict.fromkeys(changed, str(chance.randrange(9)).encode()))
                tracked.changed(changed)
            case 5 if chance.random() < 0.05:
                tracked.clear()
        for keys in prompts:
            cut = keys[: chance.randrange(321) * KEY]
            runs, blocks = tracked.leading(cut)
            assert values(runs) == [redis.get(key) for key in keys_of(cut)[:blocks]]
            assert list(runs) == runs_of(values(runs))
            known += blocks
        assert len(tracked) <= 6 * 64
    assert known  # else nothing was tried

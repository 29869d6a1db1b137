"""Remembered block keys: always those that would be computed anew, in bounded memory."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvmesh.blocks.block_keys as module
from kvmesh.blocks.block_keys import CHUNK_BLOCKS, KnownBlockKeys, PromptKeys, block_keys, root_key

ROOTS = tuple(root_key(hash_seed="kvmesh", model=model) for model in ("tiny", "other"))


def tokens_of(seed: int, *, blocks: int, block_size: int = 1, more: int = 0) -> bytes:
    return random.Random(seed).randbytes((blocks * block_size + more) * 4)


PROMPTS = st.tuples(
    st.integers(0, 2),  # the seed of the beginning: few, so that prompts share it
    st.integers(0, 4 * CHUNK_BLOCKS),  # tokens that are shared
    st.binary(max_size=40).map(lambda tail: tail[: len(tail) // 4 * 4]),
    st.sampled_from((1, 2, 3, 16)),
    st.sampled_from(ROOTS),
)


@pytest.mark.thorough
@given(st.lists(PROMPTS, max_size=12), st.sampled_from((0, 2000, 1 << 20)))
def test_remembered_keys_are_those_computed_anew(
    prompts: list[tuple[int, int, bytes, int, bytes]], limit_bytes: int
) -> None:
    known = KnownBlockKeys(limit_bytes=limit_bytes)
    for seed, shared, tail, block_size, root in prompts:
        tokens = tokens_of(seed, blocks=4 * CHUNK_BLOCKS)[: shared * 4] + tail
        expected = block_keys(tokens, block_size=block_size, parent=root)

        assert known.keys(tokens, block_size=block_size, parent=root) == expected
        assert known.held_bytes <= limit_bytes


@given(
    st.integers(0, 4 * CHUNK_BLOCKS),
    st.integers(0, 4 * CHUNK_BLOCKS),
    st.lists(st.one_of(st.none(), st.integers(0, 5 * CHUNK_BLOCKS)), max_size=6),
)
def test_keys_reached_in_any_steps_are_the_first_of_those_computed_anew(
    blocks: int, seen: int, steps: list[int | None]
) -> None:
    tokens, known = tokens_of(1, blocks=blocks), KnownBlockKeys()
    expected = block_keys(tokens, block_size=1, parent=ROOTS[0])
    known.keys(tokens[: seen * 4], block_size=1, parent=ROOTS[0])
    prompt = PromptKeys(known, tokens, block_size=1, parent=ROOTS[0])
    for step in steps:
        got = prompt.reach_unknown() if step is None else prompt.reach(step)
        least = min(seen // CHUNK_BLOCKS + 1, 1 + blocks // CHUNK_BLOCKS) * CHUNK_BLOCKS if step is None else step

        assert got == expected[: len(got)]
        assert len(got) >= 8 * min(least, blocks)
    assert prompt.blocks == blocks


def test_a_prompt_never_seen_is_hashed_no_further_than_a_chunk_beyond_what_is_asked_for() -> None:
    prompt = PromptKeys(
        KnownBlockKeys(), tokens_of(1, blocks=10 * CHUNK_BLOCKS, block_size=16), block_size=16, parent=ROOTS[0]
    )

    assert len(prompt.reach_unknown()) == 8 * CHUNK_BLOCKS
    assert len(prompt.reach(CHUNK_BLOCKS + 1)) == 8 * 2 * CHUNK_BLOCKS


def test_a_known_prefix_is_not_hashed_again_and_a_new_tail_is(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(tokens: bytes, *, block_size: int, parent: bytes) -> bytes:
        computed.append(len(tokens) // (block_size * 4))
        return block_keys(tokens, block_size=block_size, parent=parent)

    monkeypatch.setattr(module, "block_keys", counted)
    known = KnownBlockKeys()
    prefix = tokens_of(1, blocks=2 * CHUNK_BLOCKS, block_size=16)
    known.keys(prefix, block_size=16, parent=ROOTS[0])
    computed.clear()
    known.keys(prefix + tokens_of(2, blocks=3, block_size=16, more=5), block_size=16, parent=ROOTS[0])

    assert sum(computed) == 3


def test_equal_digests_of_different_tokens_do_not_mix_keys_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Colliding:
        @staticmethod
        def xxh3_64_digest(_: bytes) -> bytes:
            return b"the same"

    monkeypatch.setattr(module, "xxhash", Colliding)
    known = KnownBlockKeys()
    prompts = [tokens_of(seed, blocks=2 * CHUNK_BLOCKS) for seed in (1, 2, 1)]
    # a chunk of one block size holds as many bytes as half of one of twice the size
    asked = [(prompt, size) for prompt in prompts for size in (1, 2)]

    assert [known.keys(tokens, block_size=size, parent=ROOTS[0]) for tokens, size in asked] == [
        block_keys(tokens, block_size=size, parent=ROOTS[0]) for tokens, size in asked
    ]


def test_what_was_not_used_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (tokens_of(seed, blocks=CHUNK_BLOCKS) for seed in range(3))
    one_entry = CHUNK_BLOCKS * (4 + 8) + module.ENTRY_BYTES
    known = KnownBlockKeys(limit_bytes=2 * one_entry)
    for tokens in (first, second, first, third):
        known.keys(tokens, block_size=1, parent=ROOTS[0])
    computed: list[bytes] = []

    def counted(tokens: bytes, *, block_size: int, parent: bytes) -> bytes:
        computed.append(tokens)
        return block_keys(tokens, block_size=block_size, parent=parent)

    monkeypatch.setattr(module, "block_keys", counted)
    for tokens in (first, third, second):
        known.keys(tokens, block_size=1, parent=ROOTS[0])

    assert [tokens for tokens in computed if tokens] == [second]


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        KnownBlockKeys().keys(tokens_of(1, blocks=1), block_size=0, parent=ROOTS[0])


def test_a_prompt_that_leaves_a_known_one_at_a_chunk_is_found_again_by_each_way() -> None:
    known = KnownBlockKeys()
    begin, one, other = (tokens_of(seed, blocks=2 * CHUNK_BLOCKS) for seed in (1, 2, 3))
    for tokens in (begin + one, begin + other, begin + one, other + one, begin + other, begin):
        assert known.keys(tokens, block_size=1, parent=ROOTS[0]) == block_keys(tokens, block_size=1, parent=ROOTS[0])


def test_keys_stay_true_while_what_followed_is_forgotten_and_learnt_again() -> None:
    room = 3 * (CHUNK_BLOCKS * (4 + 8) + module.ENTRY_BYTES)  # for three chunks; each prompt has four
    known, source = KnownBlockKeys(limit_bytes=room), random.Random(5)
    prompts = [tokens_of(1, blocks=2 * CHUNK_BLOCKS) + tokens_of(seed, blocks=2 * CHUNK_BLOCKS) for seed in (2, 3)]
    for _ in range(60):
        tokens = source.choice(prompts)[: 4 * source.randint(1, 4 * CHUNK_BLOCKS)]
        assert known.keys(tokens, block_size=1, parent=ROOTS[0]) == block_keys(tokens, block_size=1, parent=ROOTS[0])
        assert known.held_bytes <= room


def test_forgetting_lets_go_of_what_is_used_all_the_time_where_everything_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECOND_CHANCES", 2)
    room = 4 * (CHUNK_BLOCKS * (4 + 8) + module.ENTRY_BYTES)
    known = KnownBlockKeys(limit_bytes=room)
    prompts = [tokens_of(seed, blocks=CHUNK_BLOCKS) for seed in range(8)]
    for tokens in prompts[:4] * 2 + prompts[4:]:
        assert known.keys(tokens, block_size=1, parent=ROOTS[0]) == block_keys(tokens, block_size=1, parent=ROOTS[0])
        assert known.held_bytes <= room


@given(st.integers(0, 70), st.integers(0, 80))
def test_keys_may_be_asked_for_of_the_first_blocks_alone(blocks: int, more: int) -> None:
    tokens = tokens_of(4, blocks=blocks, more=more)
    prompt = PromptKeys(KnownBlockKeys(), tokens, block_size=1, parent=ROOTS[0], blocks=blocks)

    assert prompt.reach(blocks + more) == block_keys(tokens[: blocks * 4], block_size=1, parent=ROOTS[0])
    assert prompt.blocks == blocks

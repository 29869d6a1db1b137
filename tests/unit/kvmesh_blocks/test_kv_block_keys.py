"""Block keys: the same tokens give the same keys, anything else different ones."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.blocks.block_keys import FEW_BLOCKS, NAME_LIMIT, block_keys, held_digest, held_name, root_key, split_keys

ROOT = root_key(hash_seed="kvmesh", model="tiny")
FOUR_BLOCKS = bytes(range(256))  # 64 tokens of 4 bytes


def test_a_key_is_the_hash_of_its_parent_and_its_tokens() -> None:
    first = xxhash.xxh3_64(ROOT + FOUR_BLOCKS[:64]).digest()
    second = xxhash.xxh3_64(first + FOUR_BLOCKS[64:128]).digest()

    assert block_keys(FOUR_BLOCKS[:128], block_size=16, parent=ROOT) == first + second


def test_keys_and_roots_never_change_between_versions() -> None:
    assert ROOT.hex() == "6894263d6b82aac9"
    assert block_keys(FOUR_BLOCKS, block_size=32, parent=ROOT).hex() == "3c096263dfa2556f47487290b6744fe4"


def test_a_trailing_partial_block_has_no_key() -> None:
    whole = block_keys(FOUR_BLOCKS[:128], block_size=16, parent=ROOT)

    assert block_keys(FOUR_BLOCKS[:188], block_size=16, parent=ROOT) == whole
    assert block_keys(FOUR_BLOCKS[:60], block_size=16, parent=ROOT) == b""
    assert block_keys(b"", block_size=16, parent=ROOT) == b""


def test_a_memoryview_gives_the_same_keys() -> None:
    assert block_keys(memoryview(FOUR_BLOCKS), block_size=16, parent=ROOT) == block_keys(
        FOUR_BLOCKS, block_size=16, parent=ROOT
    )


@given(st.binary(max_size=640), st.integers(1, 20), st.integers(0, 20))
def test_continuing_from_a_parent_equals_one_chain(tokens: bytes, block_size: int, cut: int) -> None:
    whole = block_keys(tokens, block_size=block_size, parent=ROOT)
    head = block_keys(tokens[: cut * block_size * 4], block_size=block_size, parent=ROOT)
    tail = block_keys(tokens[cut * block_size * 4 :], block_size=block_size, parent=head[-8:] or ROOT)

    assert head + tail == whole


def test_an_extra_key_changes_its_block_and_all_later_ones() -> None:
    plain = split_keys(block_keys(FOUR_BLOCKS, block_size=16, parent=ROOT))
    extra = split_keys(block_keys(FOUR_BLOCKS, block_size=16, parent=ROOT, extra=[None, b"image", None, None]))

    assert [mine == theirs for mine, theirs in zip(plain, extra, strict=True)] == [True, False, False, False]


def test_too_few_extra_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="1 extra entries for 4 blocks"):
        block_keys(FOUR_BLOCKS, block_size=16, parent=ROOT, extra=[None])


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        block_keys(FOUR_BLOCKS, block_size=0, parent=ROOT)


def test_seed_model_adapter_and_salt_each_give_another_root() -> None:
    roots = {
        ROOT,
        root_key(hash_seed="other", model="tiny"),
        root_key(hash_seed="kvmesh", model="tiny2"),
        root_key(hash_seed="kvmesh", model="tiny", lora="a"),
        root_key(hash_seed="kvmesh", model="tiny", cache_salt="a"),
        root_key(hash_seed="kvmes", model="htiny"),
    }

    assert len(roots) == 6
    assert {len(root) for root in roots} == {8}


@pytest.mark.parametrize("count", [0, 1, FEW_BLOCKS - 1, FEW_BLOCKS, FEW_BLOCKS + 1, 3 * FEW_BLOCKS])
@pytest.mark.parametrize("block_size", [1, 16])
def test_any_number_of_blocks_is_chained_alike(count: int, block_size: int) -> None:
    tokens = b"".join(number.to_bytes(4, "little") for number in range(count * block_size))
    keys, key = [], ROOT
    for at in range(0, len(tokens), 4 * block_size):
        key = xxhash.xxh3_64(key + tokens[at : at + 4 * block_size]).digest()
        keys.append(key)

    assert block_keys(tokens + bytes(3), block_size=block_size, parent=ROOT) == b"".join(keys)


def test_a_name_is_held_as_it_is_or_as_a_short_digest_with_the_same_root() -> None:
    names = ["x" * NAME_LIMIT, "x" * (NAME_LIMIT + 1), "y" * 900_000, "é" * 900_000]
    held = [held_name(name) for name in names]

    assert held[0] == names[0]
    assert all(len(each) < NAME_LIMIT for each in held[1:])
    assert len({*held}) == len(names)
    assert [held_name(each) for each in held] == held
    for name, short in zip(names, held, strict=True):
        for field in ("lora", "cache_salt"):
            of_name, of_short = ({field: each} for each in (name, short))
            assert root_key(hash_seed="s", model="m", **of_name) == root_key(hash_seed="s", model="m", **of_short)


def test_a_digest_is_held_as_it_is_or_as_a_shorter_one() -> None:
    assert held_digest(b"d" * 32) == b"d" * 32
    assert len(held_digest(b"d" * 900_000)) == 16
    assert held_digest(b"d" * 900_000) != held_digest(b"e" * 900_000)

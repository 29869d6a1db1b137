"""What a stream remembers of its blocks' keys: runs as they came, then single blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_indexer.apply.remembered_keys import RememberedKeys

RUNS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def key(engine_hash: int) -> bytes:
    return engine_hash.to_bytes(8, "big")


def keys(*hashes: int) -> bytes:
    return b"".join(map(key, hashes))


@pytest.mark.parametrize("engine_hash", [1, 2, 3, 4])
def test_each_block_of_each_run_is_found(engine_hash: int) -> None:
    remembered = RememberedKeys()
    remembered.add_run((1, 2, 3), keys(1, 2, 3))
    remembered.add_run((4,), keys(4))

    assert (remembered[engine_hash], remembered.get(5), len(remembered)) == (key(engine_hash), None, 4)


def test_what_was_spread_is_found_beside_what_came_after_it() -> None:
    remembered = RememberedKeys({1: key(1)})
    remembered.add_run((2, 3), keys(2, 3))
    assert 2 in remembered

    remembered.add_run((4, 5), keys(4, 5))
    remembered.update({6: key(6)})

    assert [remembered.get(each) for each in range(1, 8)] == [*map(key, range(1, 7)), None]


def test_an_unknown_block_is_an_error_if_it_must_be_known() -> None:
    with pytest.raises(KeyError):
        RememberedKeys()[1]


def test_a_run_has_a_key_for_each_block() -> None:
    with pytest.raises(ValueError, match="16 bytes of keys for 3 blocks"):
        RememberedKeys().add_run((1, 2, 3), keys(1, 2))


def test_a_run_of_nothing_is_nothing() -> None:
    remembered = RememberedKeys()
    remembered.add_run((), b"")

    assert (len(remembered), 1 in remembered) == (0, False)


@given(runs=RUNS, asked_after=st.integers(0, 8))
def test_the_oldest_go_first_whether_spread_or_not(runs: list[int], asked_after: int) -> None:
    remembered, kept, count, limit = RememberedKeys(), list[int](), 0, 6
    for number, size in enumerate(runs):
        hashes = tuple(range(count, count + size))
        remembered.add_run(hashes, keys(*hashes))
        remembered.forget_oldest(limit)
        kept, count = [*kept, *hashes], count + size
        kept = kept if len(kept) <= limit else kept[-(limit * 3 // 4) :]
        assert len(remembered) == len(kept)
        if number == asked_after:
            assert -1 not in remembered

    assert [each for each in range(count) if each in remembered] == kept


def test_two_runs_may_end_alike() -> None:
    remembered = RememberedKeys()
    remembered.add_run((1, 3), keys(1, 3))
    remembered.add_run((2, 3), keys(2, 3))

    assert [remembered.get(each) for each in (1, 2, 3)] == [key(1), key(2), key(3)]
    assert len(remembered) == 3

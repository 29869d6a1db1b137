"""Stores that wait for their parents: bounded, in order, and never more of them than the pod still has."""

from array import array

from kv_indexer.apply.orphans import Orphan, OrphanShares, OrphanTable
from kvmesh.blocks.events import BlockStored


def child(*hashes: int, parent: int = 1, tier: str = "GPU") -> BlockStored:
    tokens = array("I", range(4 * len(hashes))).tobytes()
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, tokens=tokens, block_size=4, medium=tier)


def taken(table: OrphanTable, *parents: int) -> list[tuple[tuple[int, ...], set[int]]]:
    return [(orphan.event.block_hashes, orphan.gone) for orphan in table.take(parents)]


def test_what_waits_for_a_parent_is_handed_out_once_and_in_order_of_arrival() -> None:
    table = OrphanTable()
    for event in (child(2, parent=1), child(9, parent=8), child(3, parent=7), child(4, parent=1)):
        table.add(event)

    assert table.parents() == {1, 7, 8}
    assert taken(table, 7, 1) == [((2,), set()), ((3,), set()), ((4,), set())]
    assert (taken(table, 7, 1), len(table)) == ([], 1)


def test_a_removal_takes_one_reference_to_one_block_of_one_tier_back() -> None:
    table = OrphanTable()
    for event in (child(2, 3), child(3), child(3, tier="CPU")):
        table.add(event)

    assert table.remove(tier="GPU", group=0, engine_hash=3)
    assert table.remove(tier="GPU", group=0, engine_hash=3)
    assert not table.remove(tier="GPU", group=0, engine_hash=3)
    assert not table.remove(tier="GPU", group=1, engine_hash=2)
    assert taken(table, 1) == [((2, 3), {1}), ((3,), {0}), ((3,), set())]
    assert not table.remove(tier="CPU", group=0, engine_hash=3)


def test_the_oldest_go_first_when_there_are_too_many() -> None:
    table = OrphanTable(max_events=2)

    assert [table.add(child(number)) for number in (2, 3, 4)] == [0, 0, 1]
    assert not table.remove(tier="GPU", group=0, engine_hash=2)
    assert taken(table, 1) == [((3,), set()), ((4,), set())]


def test_the_oldest_go_first_when_they_are_too_large() -> None:
    table = OrphanTable(shares=OrphanShares(pod_bytes=3500))

    assert [table.add(child(number)) for number in (2, 3, 4)] == [0, 0, 1]
    assert table.add(child(*range(100))) == 1  # alone too large: it pushes nobody out
    assert len(table) == 2


def test_a_clear_empties_the_table_for_good() -> None:
    table = OrphanTable(shares=OrphanShares(pod_bytes=3500))
    table.add(child(2))
    table.clear()

    assert (len(table), table.parents(), taken(table, 1)) == (0, set(), [])
    assert [table.add(child(number)) for number in (2, 3)] == [0, 0]  # its bytes are free again


def test_a_hash_that_is_twice_in_one_event_is_two_references() -> None:
    table = OrphanTable()
    table.add(child(2, 2))

    assert [table.remove(tier="GPU", group=0, engine_hash=2) for _ in range(3)] == [True, True, False]


def test_all_ranks_of_a_pod_share_what_one_pod_may_keep() -> None:
    shares = OrphanShares(pod_bytes=3500)
    ranks = [OrphanTable(pod="a", shares=shares) for _ in range(3)]

    assert [table.add(child(2)) for table in ranks] == [0, 0, 1]
    assert [len(table) for table in ranks] == [1, 1, 0]
    ranks[0].clear()
    assert ranks[2].add(child(2)) == 0


def test_many_pods_share_what_all_may_keep_and_none_pushes_another_out() -> None:
    shares = OrphanShares(pod_bytes=4000, all_bytes=7000)
    greedy, modest = (OrphanTable(pod=pod, shares=shares) for pod in "ab")
    assert [greedy.add(child(number)) for number in (2, 3, 4)] == [0, 0, 1]

    assert modest.add(child(2)) == 0
    assert (len(greedy), len(modest)) == (2, 1)
    assert greedy.add(child(5)) == 1
    assert (len(greedy), len(modest)) == (2, 1)


def test_what_waits_is_asked_for_in_turn() -> None:
    table = OrphanTable()
    for number in range(5):
        table.add(child(100 + number, parent=number))

    assert [table.some_parents(2) for _ in range(3)] == [{0, 1}, {2, 3}, {4, 0}]


def test_what_a_pod_chose_counts_by_its_length() -> None:
    folded = (b"x" * 5000,)
    assert Orphan(event=child(2), folded=folded).size == Orphan(event=child(2)).size + 5000


def test_a_parent_that_is_named_twice_hands_its_children_out_once() -> None:
    table = OrphanTable()
    table.add(child(3, parent=2))

    assert taken(table, 2, 2) == [((3,), set())]

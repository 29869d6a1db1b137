"""Who takes and gives back which stream, from what all indexers say."""

from kv_indexer.share.redis_leases import UNOWNED_MS, IndexerRecord, LeasePlan, LeaseView, portions

NOW = 100_000.0
FIVE = [b"10.0.0.%d:8000#0" % number for number in range(5)]


def record(*names: bytes, until_ms: float = NOW + 1000, endpoints: tuple[str, ...] = ()) -> IndexerRecord:
    listed = {name.decode().rpartition("#")[0] for name in names}
    return IndexerRecord(until_ms=until_ms, endpoints=frozenset(listed.union(endpoints)), streams=frozenset(names))


def plan(**others: IndexerRecord) -> LeasePlan:
    return LeasePlan(me="me", records={"me": record(*FIVE)} | others, now_ms=NOW)


def view(*held: bytes, free: dict[bytes, float] | None = None, **owners: int) -> LeaseView:
    return LeaseView(held=dict.fromkeys(held, 1), free=free or {}, owners=owners)


def test_an_indexer_alone_takes_all_that_is_free_and_gives_nothing_back() -> None:
    assert plan().wanted(view(free=dict.fromkeys(FIVE, NOW)), held=0) == FIVE
    assert plan().surplus(view(*FIVE)) == []


def test_of_two_each_takes_its_share_and_gives_back_what_exceeds_it_from_the_end() -> None:
    two = plan(you=record(*FIVE))
    assert two.wanted(view(free=dict.fromkeys(FIVE, NOW)), held=1) == FIVE[:2]
    assert two.surplus(view(*FIVE)) == [FIVE[4], FIVE[3]]
    assert two.surplus(view(*FIVE[:4], you=1)) == [FIVE[3]]


def test_nothing_is_given_to_one_that_has_its_share_could_not_follow_it_or_is_dead() -> None:
    assert plan(you=record(*FIVE)).surplus(view(*FIVE, you=3)) == []
    assert plan(you=record(b"10.9.9.9:8000#0")).surplus(view(*FIVE)) == []
    assert plan(you=record(*FIVE, until_ms=NOW - 1)).surplus(view(*FIVE)) == []


def test_what_nobody_took_for_long_is_taken_regardless_of_the_share() -> None:
    free = {FIVE[0]: NOW - UNOWNED_MS - 1, FIVE[1]: NOW - 1}
    assert plan(you=record(*FIVE)).wanted(view(free=free), held=3) == [FIVE[0]]


def test_only_what_we_could_follow_is_taken() -> None:
    assert plan().wanted(view(free={b"10.9.9.9:8000#0": 0.0}), held=0) == []


def test_endpoints_of_an_indexer_that_was_there_a_moment_ago_are_listed_still() -> None:
    names = [b"10.1.0.1:8000#0", b"10.1.0.1:8000#1", b"10.1.0.2:8000#0", b"[::1]:8000#0"]
    late = record(until_ms=NOW - 1, endpoints=("10.1.0.1:8000",))
    assert plan(late=late).unlisted(names) == names[2:]


def test_a_stream_is_given_up_when_no_live_indexer_could_follow_it_for_long() -> None:
    free = {b"a:1#0": NOW - 5000, b"b:1#0": NOW - 5000, b"c:1#0": NOW - 1}
    others = {"you": record(b"b:1#0"), "late": record(b"a:1#0", until_ms=NOW - 1)}
    assert plan(**others).unfollowed(view(free=free)) == [b"a:1#0"]


def test_names_are_cut_into_portions() -> None:
    assert [len(each) for each in portions(FIVE, 2)] == [2, 2, 1]
    assert portions([], 2) == []

"""Who the other replicas are and what they have booked, from what Redis answers at each moment."""

import hiredis

from extproc.shared.shared_load import EndpointBookings
from extproc.shared.shared_records import FORGET_SECONDS, MAX_REPLICAS, HeardReplicas, pack_read_loads

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
ONE, TWO = b'{"10.0.0.1:8000":[1,10,100]}', b'{"10.0.0.1:8000":[2,0,0],"10.0.0.2:8000":[1,1,1]}'


def commands(packed: bytes) -> list[bytes]:
    """Return the words of one command; none of an empty one."""
    reader = hiredis.Reader()
    reader.feed(packed)
    return reader.gets() or []


def heard() -> HeardReplicas:
    return HeardReplicas(own=b"own", lease_seconds=2.0)


def test_the_others_are_asked_for_and_never_oneself() -> None:
    replicas = heard()
    assert replicas.question == b""

    replicas.learn([b"own", b"two", b"one"], [None], now=0.0)
    assert replicas.question == pack_read_loads([b"one", b"two"])

    replicas.learn([b"own"], [ONE, TWO], now=0.5)
    assert (replicas.question, replicas.others, replicas.replicas) == (b"", {}, 0)


def test_answers_add_up_and_the_newest_replaces_the_one_before() -> None:
    replicas = heard()
    replicas.learn([b"one", b"two"], [None], now=0.0)

    replicas.hear([ONE, TWO], now=0.0)
    assert (replicas.others, replicas.replicas) == (
        {A: EndpointBookings(3, 10, 100), B: EndpointBookings(1, 1, 1)},
        2,
    )
    replicas.hear([ONE, None], now=0.1)
    assert (replicas.others, replicas.replicas) == ({A: EndpointBookings(1, 10, 100)}, 1)
    replicas.hear([None, None], now=0.2)
    assert (replicas.others, replicas.replicas) == ({}, 0)


def test_two_replicas_that_say_the_same_count_twice() -> None:
    replicas = heard()
    replicas.hear([ONE, ONE], now=0.0)

    assert (replicas.others, replicas.replicas) == ({A: EndpointBookings(2, 20, 200)}, 2)


def test_a_record_that_cannot_be_read_hides_no_other() -> None:
    replicas = heard()
    replicas.hear([b"junk", ONE, 7], now=0.0)

    assert (replicas.others, replicas.replicas) == ({A: EndpointBookings(1, 10, 100)}, 1)


def test_the_last_word_is_good_for_a_lease() -> None:
    replicas = heard()
    assert not replicas.is_fresh(now=0.0)
    replicas.hear([ONE], now=0.0)

    assert [replicas.is_fresh(now=now) for now in (0.0, 2.0, 2.1)] == [True, True, False]


def test_a_replica_that_is_silent_for_long_is_taken_off_the_list() -> None:
    replicas = heard()
    names = [b"dead", b"own", b"slow"]
    replicas.learn(names, [None], now=0.0)
    assert replicas.learn(names, [None, ONE], now=1.0) == []
    assert replicas.learn(names, [None, None], now=2.0) == []
    assert replicas.learn(names, [None, ONE], now=1.0 + FORGET_SECONDS) == []
    assert replicas.learn(names, [None, ONE], now=1.1 + FORGET_SECONDS) == [b"dead"]
    assert replicas.question == pack_read_loads([b"slow"])


def test_a_replica_that_speaks_again_is_asked_again() -> None:
    replicas = heard()
    replicas.learn([b"back"], [None], now=0.0)
    replicas.learn([b"back"], [None], now=1.0)
    replicas.learn([], [None], now=2.0 + FORGET_SECONDS)

    assert replicas.learn([b"back"], [None], now=3.0 + FORGET_SECONDS) == []
    assert replicas.question == pack_read_loads([b"back"])


def test_a_list_that_someone_has_filled_hides_nobody_who_lives() -> None:
    replicas = heard()
    names = [b"a%03d" % number for number in range(200)] + [b"living"]
    for moment in range(8):
        asked = commands(replicas.question)[1:]
        replicas.learn(names, [ONE if name.endswith(b"living") else None for name in asked], now=float(moment))

    assert len(commands(replicas.question)) == 1 + MAX_REPLICAS
    assert replicas.replicas == 1


def test_a_list_that_cannot_be_read_changes_nothing() -> None:
    replicas = heard()
    replicas.learn([b"one"], [None], now=0.0)
    replicas.learn(Exception("WRONGTYPE"), [ONE], now=0.5)

    assert (replicas.question, replicas.replicas) == (pack_read_loads([b"one"]), 1)

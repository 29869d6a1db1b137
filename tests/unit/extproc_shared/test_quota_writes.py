"""What Redis has still to be told: added up by key, never forgotten, never told twice."""

from extproc.policy.priority import Quota
from extproc.shared.quota import NOTHING, QuotaAsk, QuotaKey, quota_key
from extproc.shared.quota_records import MOST_ENDS, MOST_KEYS, QuotaWrite, QuotaWrites


def key() -> QuotaKey:
    return quota_key(Quota(concurrent_requests=3), name=b"abc")


def ask(of: QuotaKey, member: bytes = b"1") -> QuotaAsk:
    return QuotaAsk(key=of, prompt_tokens=1, reserved_tokens=1, member=member, asked_at=0.0)


def told(writes: list[QuotaWrite]) -> list[tuple[object, ...]]:
    return [(each.key, each.amounts, each.ended, each.renewed) for each in writes]


def test_the_ends_of_one_tenant_are_one_write() -> None:
    one, two, writes = key(), key(), QuotaWrites()
    writes.ended(ask(one, b"1"), (0.0, 1.0, -5.0), has_lease=True)
    writes.ended(ask(two, b"2"), (0.0, 0.0, 3.0), has_lease=False)
    writes.ended(ask(one, b"3"), (-1.0, 2.0, -5.0), has_lease=True)

    assert told(writes.take(renew_before=0.0, most_members=10)) == [
        (one, (-1.0, 3.0, -10.0), [b"1", b"3"], []),
        (two, (0.0, 0.0, 3.0), [], []),
    ]
    assert writes.take(renew_before=0.0, most_members=10) == []


def test_who_used_what_was_taken_is_not_written() -> None:
    writes = QuotaWrites()
    writes.ended(ask(key()), NOTHING, has_lease=False)
    assert len(writes) == 0


def test_leases_are_renewed_when_they_are_old_and_as_long_as_they_are_open() -> None:
    one, writes = key(), QuotaWrites()
    young, old, ended = ask(one, b"young"), ask(one, b"old"), ask(one, b"ended")
    writes.opened(young, renewed_at=10.0)
    writes.opened(old, renewed_at=1.0)
    writes.opened(ended, renewed_at=1.0)
    writes.ended(ended, NOTHING, has_lease=True)
    taken = writes.take(renew_before=5.0, most_members=10)

    assert told(taken) == [(one, NOTHING, [b"ended"], []), (one, NOTHING, [], [b"old"])]
    writes.written(taken, now=20.0)
    assert told(writes.take(renew_before=15.0, most_members=10)) == [(one, NOTHING, [], [b"young"])]
    assert writes.open_members == 2


def test_what_ends_while_its_renewal_is_written_is_not_open_again() -> None:
    one, writes = key(), QuotaWrites()
    writes.opened(ask(one), renewed_at=1.0)
    taken = writes.take(renew_before=5.0, most_members=10)
    writes.ended(ask(one), NOTHING, has_lease=True)
    writes.written(taken, now=6.0)
    assert writes.open_members == 0


def test_what_was_not_written_is_due_again_with_what_came_meanwhile() -> None:
    one, writes = key(), QuotaWrites()
    writes.ended(ask(one, b"1"), (0.0, 1.0, -5.0), has_lease=True)
    failed = writes.take(renew_before=0.0, most_members=10)
    writes.ended(ask(one, b"2"), (0.0, 1.0, 0.0), has_lease=True)
    writes.put_back(failed)

    assert told(writes.take(renew_before=0.0, most_members=10)) == [(one, (0.0, 2.0, -5.0), [b"2", b"1"], [])]


def test_of_a_write_that_may_be_done_the_ends_are_written_again() -> None:
    one, two, writes = key(), key(), QuotaWrites()
    writes.ended(ask(one, b"1"), (0.0, 1.0, -5.0), has_lease=True)
    writes.ended(ask(two, b"2"), NOTHING, has_lease=True)
    writes.put_back(writes.take(renew_before=0.0, most_members=10), may_be_done=True)

    assert told(writes.take(renew_before=0.0, most_members=10)) == [
        (one, NOTHING, [b"1"], []),
        (two, NOTHING, [b"2"], []),
    ]


def test_while_redis_is_away_only_so_many_ends_wait() -> None:
    one, writes = key(), QuotaWrites()
    for number in range(MOST_ENDS + 3):
        writes.ended(ask(one, b"%d" % number), NOTHING, has_lease=True)
    writes.put_back(writes.take(renew_before=0.0, most_members=500))
    assert sum(len(each.ended) for each in writes.take(renew_before=0.0, most_members=500)) == MOST_ENDS


def test_many_members_are_several_commands_and_the_amounts_are_in_one_only() -> None:
    one, writes = key(), QuotaWrites()
    for number in range(5):
        writes.ended(ask(one, b"%d" % number), (0.0, 1.0, 0.0), has_lease=True)
    assert told(writes.take(renew_before=0.0, most_members=2)) == [
        (one, (0.0, 5.0, 0.0), [b"0", b"1"], []),
        (one, NOTHING, [b"2", b"3"], []),
        (one, NOTHING, [b"4"], []),
    ]


def test_while_redis_is_away_only_so_many_keys_wait() -> None:
    writes = QuotaWrites()
    for _ in range(MOST_KEYS + 3):
        writes.ended(ask(key()), (0.0, 1.0, 0.0), has_lease=False)
    assert (len(writes), writes.dropped) == (MOST_KEYS, 3)


def test_the_end_of_what_was_not_answered_is_written_once_more_and_not_at_once() -> None:
    one, writes = key(), QuotaWrites()
    known, unknown = ask(one, b"known"), ask(one, b"unknown")
    known.is_answered = True
    for each in (known, unknown):
        writes.ended(each, NOTHING, has_lease=True)
    written = [told(writes.take(renew_before=0.0, most_members=10))]
    assert writes.has_doubtful_ends
    for _ in range(3):
        writes.end_again()
        written.append(told(writes.take(renew_before=0.0, most_members=10)))

    assert written == [
        [(one, NOTHING, [b"known", b"unknown"], [])],
        [],
        [(one, NOTHING, [b"unknown"], [])],
        [],
    ]
    assert not writes.has_doubtful_ends

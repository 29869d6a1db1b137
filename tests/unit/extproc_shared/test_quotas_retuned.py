"""Quotas change while requests are open: what is open stays counted, and levels stay where they are."""

from msgspec import structs

from extproc.shared.quota import Limit
from tests.unit.extproc_shared.test_quotas_alone import ALL, Alone


def test_what_is_open_counts_against_the_new_limit() -> None:
    alone = Alone(ALL)
    asks = [alone.ask() for _ in range(3)]
    for ask in asks:
        assert alone.quotas.alone(ask, "no Redis", was_done=False).allowed
    alone.quotas.reconfigure((structs.replace(ALL, concurrent_requests=3),))
    assert alone.alone().limit is Limit.CONCURRENT_REQUESTS
    alone.quotas.settle(asks[0])
    assert alone.alone().allowed


def test_a_quota_that_is_as_it_was_keeps_its_key_and_what_it_has_used() -> None:
    alone = Alone(ALL)
    key = alone.key()
    while alone.alone().limit is None:
        pass
    alone.quotas.reconfigure((structs.replace(ALL, tenant="bob"), ALL))
    assert alone.key() is key
    assert alone.alone().limit is not None


def test_a_quota_that_is_gone_limits_nobody_and_still_settles_what_is_open() -> None:
    alone = Alone(ALL)
    ask = alone.ask()
    alone.quotas.alone(ask, "no Redis", was_done=False)
    alone.quotas.reconfigure(())
    assert alone.quotas.match("alice", "tiny") is None
    assert alone.quotas.is_used  # its lease is to be ended
    alone.quotas.settle(ask, generated_tokens=5)
    assert alone.quotas.facts()["open_requests"] == 0
    assert ask.key.share.open_requests == 0


def test_a_new_limit_of_an_old_quota_starts_full() -> None:
    alone = Alone(structs.replace(ALL, requests_per_minute=None))
    alone.answered([0, 0, 0, 900_000, 90_000])  # Redis answers 0 without a limit
    alone.quotas.reconfigure((ALL,))
    verdict = alone.alone()
    assert verdict.allowed
    assert verdict.levels[0] == verdict.terms[0].capacity - 1


def test_whoever_had_no_quota_gets_the_new_one() -> None:
    alone = Alone()
    assert alone.quotas.match("alice", "tiny") is None
    alone.quotas.reconfigure((ALL,))
    assert alone.quotas.match("alice", "tiny") is not None

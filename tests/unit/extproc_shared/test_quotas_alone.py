"""One replica's quotas without sockets: what it decides by itself, and what it writes for whom."""

from collections.abc import Sequence
from typing import Any

import hiredis

from extproc.ledger.process_telemetry import show_quotas
from extproc.policy.priority import Quota
from extproc.shared.quota import Limit, QuotaAsk, QuotaKey, QuotaNote, QuotaVerdict
from extproc.shared.shared_quotas import ELSEWHERE_SECONDS, MOST_KEYS, Quotas
from kvmesh.metrics.registry import Registry
from kvmesh.redis.link import RedisLink

FULL = [0, 0, 9000, 900_000, 90_000]
ALL = Quota(
    requests_per_minute=60, prompt_tokens_per_minute=6000, generated_tokens_per_minute=600, concurrent_requests=4
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Alone:
    """Quotas whose Redis is never reached."""

    def __init__(self, *quotas: Quota, others: int = 0) -> None:
        self.clock = Clock()
        self.others = others
        self.quotas = Quotas(
            RedisLink("redis://127.0.0.1:1"),
            hash_seed="seed",
            quotas=quotas,
            others=lambda: self.others,
            clock=self.clock,
        )

    def key(self) -> QuotaKey:
        key = self.quotas.match("alice", "tiny")
        assert key is not None
        return key

    def ask(self, *, prompt_tokens: int = 100, most_generated: int | None = 10) -> QuotaAsk:
        return self.quotas.ask(self.key(), prompt_tokens=prompt_tokens, most_generated=most_generated)

    def alone(self, **what: Any) -> QuotaVerdict:
        return self.quotas.alone(self.ask(**what), "no Redis", was_done=False)

    def answered(self, reply: Any) -> tuple[QuotaAsk, QuotaVerdict]:
        ask = self.ask()
        self.quotas.command(ask)
        return ask, self.quotas.take(ask, [reply])

    def due(self) -> Sequence[tuple[tuple[float, ...], int]]:
        """What would be written: amounts and the number of ended members, by key."""
        writes = self.quotas._writes.take(renew_before=0.0, most_members=500)
        return [(write.amounts, len(write.ended)) for write in writes]


def test_no_quotas_cost_no_look() -> None:
    assert Alone().quotas.match("alice", "tiny") is None


def test_the_same_tenant_and_model_have_one_key_and_the_memory_of_them_is_bounded() -> None:
    one = Alone(ALL).quotas
    first = one.match("alice", "tiny")
    assert one.match("alice", "tiny") is first
    for number in range(MOST_KEYS + 10):
        one.match(f"tenant-{number}", "tiny")
    assert one.facts()["keys"] == MOST_KEYS


def test_an_allowed_request_takes_and_its_end_corrects() -> None:
    one = Alone(ALL)
    ask, verdict = one.answered(FULL)
    assert (verdict.allowed, verdict.degraded, one.quotas.facts()["open_requests"]) == (True, None, 1)
    one.quotas.settle(ask, generated_tokens=4, prompt_tokens=103)
    one.quotas.settle(ask, generated_tokens=400)

    assert one.due() == [((0.0, 3.0, -6.0), 1)]
    assert one.quotas.facts()["open_requests"] == 0


def test_what_nobody_knows_stays_as_it_was_reserved() -> None:
    one = Alone(ALL)
    ask, _ = one.answered(FULL)
    one.quotas.settle(ask)
    assert one.due() == [((0.0, 0.0, 0.0), 1)]


def test_whoever_reads_the_response_corrects_what_was_reserved() -> None:
    one, other = Alone(ALL), Alone(ALL)
    ask, _ = one.answered(FULL)
    one.quotas.settle(ask, prompt_tokens=100)
    assert ask.note == QuotaNote("alice", "tiny", 10)
    other.quotas.generated(ask.note, 4)

    assert one.due() == [((0.0, 0.0, 0.0), 1)]
    assert other.due() == [((0.0, 0.0, -6.0), 0)]
    for _ in range(30):
        other.quotas.generated(ask.note, 4)
    assert other.ask(most_generated=None).reserved_tokens == 5


def test_responses_without_a_quota_of_generated_tokens_are_not_read() -> None:
    one = Alone(Quota(requests_per_minute=60))
    assert one.ask().note is None
    one.quotas.generated(QuotaNote("alice", "tiny", 10), 4)
    one.quotas.generated(QuotaNote("nobody", "tiny", 10), 4)
    assert one.due() == []


def test_alone_a_response_that_was_read_counts_at_once() -> None:
    one = Alone(Quota(generated_tokens_per_minute=600, burst_seconds=1))
    ask = one.ask(most_generated=10)
    assert one.quotas.alone(ask, "no Redis", was_done=False).allowed
    assert ask.note is not None
    one.quotas.generated(ask.note, 40)
    assert 3.9 < one.alone(most_generated=10).wait_seconds <= 4.0


def test_a_refused_request_has_taken_nothing_and_gives_nothing_back() -> None:
    one = Alone(ALL)
    ask, verdict = one.answered([2, 1500, 9000, 0, 90_000])
    one.quotas.cancel(ask)

    assert (verdict.limit, verdict.wait_seconds) == (Limit.PROMPT_TOKENS, 1.5)
    assert one.due() == []


def test_a_request_that_goes_nowhere_gives_everything_back() -> None:
    one = Alone(ALL)
    ask, _ = one.answered(FULL)
    one.quotas.cancel(ask)
    assert one.due() == [((-1.0, -100.0, -10.0), 1)]


def test_an_ask_that_was_never_sent_leaves_nothing() -> None:
    one = Alone(ALL)
    one.quotas.cancel(one.ask())
    assert one.due() == []


def test_an_ask_whose_answer_nobody_waited_for_ends_its_lease() -> None:
    one = Alone(ALL)
    ask = one.ask()
    one.quotas.command(ask)
    one.quotas.cancel(ask)
    assert one.due() == [((0.0, 0.0, 0.0), 1)]


def test_an_answer_that_came_late_counts_as_taken() -> None:
    one = Alone(ALL)
    ask = one.ask()
    one.quotas.command(ask)
    assert one.quotas.alone(ask, "no answer within 20 ms", was_done=True).allowed
    one.quotas.settle(ask, generated_tokens=4)
    assert one.due() == [((0.0, 0.0, -6.0), 1)]


def test_what_was_used_without_redis_is_charged_when_it_is_back() -> None:
    one = Alone(ALL)
    ask = one.ask()
    assert one.quotas.alone(ask, "no Redis", was_done=False).allowed
    one.quotas.settle(ask, generated_tokens=4)
    assert one.due() == [((1.0, 100.0, 4.0), 1)]


def test_alone_every_limit_counts() -> None:
    verdicts = {
        Limit.REQUESTS: [Alone(Quota(requests_per_minute=60, burst_seconds=2))],
        Limit.PROMPT_TOKENS: [Alone(Quota(prompt_tokens_per_minute=6000, burst_seconds=2))],
        Limit.GENERATED_TOKENS: [Alone(Quota(generated_tokens_per_minute=600, burst_seconds=2))],
        Limit.CONCURRENT_REQUESTS: [Alone(Quota(concurrent_requests=2))],
    }
    for limit, (one,) in verdicts.items():
        assert [one.alone().limit for _ in range(3)] == [None, None, limit]


def test_alone_the_share_of_this_replica_counts() -> None:
    one = Alone(Quota(requests_per_minute=60, burst_seconds=12), others=2)
    verdicts = [one.alone() for _ in range(5)]
    assert [verdict.allowed for verdict in verdicts] == [True, True, True, True, False]
    assert verdicts[0].degraded == "a share of 1/3 of the quota, decided here: no Redis"
    assert 2.9 < verdicts[-1].wait_seconds <= 3.0
    one.clock.now += 3.0
    assert one.alone().allowed


def test_alone_it_goes_on_from_what_redis_said_last() -> None:
    one = Alone(Quota(requests_per_minute=60, burst_seconds=60), others=1)
    one.answered([0, 0, 4000, 0, 0])
    assert [one.alone().allowed for _ in range(3)] == [True, True, False]
    one.answered([0, 0, 60_000, 0, 0])  # it is back, and then gone again
    assert [one.alone().allowed for _ in range(3)] == [True, True, True]


def test_alone_a_share_changes_with_the_number_of_replicas() -> None:
    one = Alone(Quota(requests_per_minute=60, burst_seconds=8), others=3)
    assert [one.alone().allowed for _ in range(3)] == [True, True, False]
    one.others = 0
    one.clock.now += 1.0  # a share of 1: one more a second
    assert [one.alone().allowed for _ in range(2)] == [True, False]


def test_alone_what_is_given_back_can_be_had_again() -> None:
    one = Alone(Quota(generated_tokens_per_minute=600, concurrent_requests=1, burst_seconds=1))
    ask = one.ask(most_generated=10)
    assert one.quotas.alone(ask, "no Redis", was_done=False).allowed
    assert one.alone(most_generated=10).limit is Limit.GENERATED_TOKENS
    one.quotas.cancel(ask)
    assert one.alone(most_generated=10).allowed


def test_a_forgotten_script_is_sent_as_text_once() -> None:
    one = Alone(ALL)
    one.answered(FULL)
    assert b"EVALSHA" in one.quotas.command(one.ask())
    _, verdict = one.answered(hiredis.ReplyError("NOSCRIPT No matching script"))
    assert "NOSCRIPT" in (verdict.degraded or "")
    assert b"EVALSHA" not in one.quotas.command(one.ask())
    one.answered(FULL)
    assert (b"EVALSHA" in one.quotas.command(one.ask()), one.quotas.problem) == (True, None)


def test_after_a_server_without_writes_asks_take_a_way_of_their_own_for_a_while() -> None:
    one = Alone(ALL)
    one.answered([-1, b"READONLY You can't write against a read only replica."])
    assert not one.quotas.goes_with_lookups
    one.clock.now += ELSEWHERE_SECONDS
    assert one.quotas.goes_with_lookups


def test_what_is_reserved_is_bounded_by_what_the_client_and_the_bucket_allow() -> None:
    one = Alone(Quota(generated_tokens_per_minute=6000, burst_seconds=10))
    reserved = [one.ask(most_generated=most).reserved_tokens for most in (None, 7, 0, 100_000, 10**400)]
    assert reserved == [256, 7, 1, 1000, 1000]
    assert Alone(Quota(requests_per_minute=1)).ask(most_generated=7).reserved_tokens == 0


def test_a_crowded_tenant_is_told_when_one_of_its_requests_is_likely_to_end() -> None:
    one = Alone(Quota(concurrent_requests=2))
    for _ in range(100):
        ask, _ = one.answered(FULL)
        one.clock.now += 8.0
        one.quotas.settle(ask)
    one.answered(FULL)
    one.answered(FULL)
    _, verdict = one.answered([4, 0, 0, 0, 0])

    assert verdict.limit is Limit.CONCURRENT_REQUESTS
    assert 3.9 < verdict.wait_seconds <= 4.0


def test_decisions_are_counted_by_outcome_and_by_who_made_them() -> None:
    one = Alone(Quota(requests_per_minute=60, burst_seconds=1))
    one.answered(FULL)
    one.answered([1, 0, 0, 0, 0])
    for _ in range(3):
        one.alone()
    page = Registry()
    show_quotas(page, one.quotas)
    found = {line for line in page.text().decode().splitlines() if not line.startswith("#")}

    assert {line for line in found if not line.endswith(" 0.0")} == {
        'kvmesh_quota_decisions_total{outcome="allowed",source="shared"} 1.0',
        'kvmesh_quota_decisions_total{outcome="requests",source="shared"} 1.0',
        'kvmesh_quota_decisions_total{outcome="requests",source="local"} 3.0',
        'kvmesh_tenant_quota_decisions_total{outcome="allowed",tenant="other"} 1.0',
        'kvmesh_tenant_quota_decisions_total{outcome="requests",tenant="other"} 4.0',
        "kvmesh_quota_open_requests 1.0",
    }
    assert "kvmesh_quota_writes_failing 0.0" in found

"""Each finding: when it appears, what it says to do, when it heals, and what must not be taken for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from kv_indexer.watch.finding_rules import StreamRules
from kv_indexer.watch.stream_activity import RECENT_SECONDS, FindingPolicy, StreamActivity, StreamFacts
from kvmesh.blocks.findings import Finding, FindingReason
from kvmesh.blocks.source import SourceState
from kvmesh.pods.pod_report import EngineCounters, PodReport

UNIX = 1_000_000.0  # unix seconds at monotonic 0
IDLE = EngineCounters(
    prompt_tokens=5000,
    cached_prompt_tokens=1000,
    generated_tokens=100,
    prefills=10,
    unfinished=0,
    queried_tokens=5000,
    hit_tokens=1000,
)


class Pod:
    """A stream and its pod over time; a second passes with every look, and a scrape happens each."""

    def __init__(self, *, rank: int | None = 0, state: SourceState | None = SourceState.LIVE, **report: object) -> None:
        self.now = 1000.0
        self.activity = StreamActivity()
        self.rank = rank
        self.counters = IDLE
        self.blocks = 10
        self.gpu_block_size: int | None = 16
        self.ranks_left_out = 0
        self.report = PodReport(scraped_at=0.0, **{"block_size": 16, "caches_prefixes": True, **report})  # type: ignore[arg-type]
        self._rules = StreamRules(FindingPolicy())
        if state is not None:
            self.activity.became(state, now=self.now)

    def settled(self) -> "Pod":
        """Look until there is a scrape to compare with."""
        for _ in range(3):
            self.look()
        return self

    def look(self, *, seconds: float = 1.0, answers: bool = True) -> list[Finding]:
        self.now += seconds
        report = replace(self.report, scraped_at=self.now) if answers else None
        facts = StreamFacts(
            endpoint="10.0.0.1:8000",
            dp_rank=self.rank,
            activity=self.activity,
            report=report,
            counters=self.counters if answers else None,
            blocks=self.blocks,
            gpu_block_size=self.gpu_block_size,
            ranks_left_out=self.ranks_left_out,
        )
        return self._rules.judge(facts, now=self.now, unix_now=UNIX + self.now)

    def watch(self, seconds: int) -> list[str]:
        """Look every second; return the reasons found at the end."""
        found = []
        for _ in range(seconds):
            found = self.look()
        return [finding.reason for finding in found]

    def serve(self, *, requests: int = 1, prompt: int = 100, hit: int = 0, events: bool = False) -> None:
        before = self.counters
        self.counters = replace(
            before,
            prompt_tokens=before.prompt_tokens + requests * prompt,
            cached_prompt_tokens=(before.cached_prompt_tokens or 0) + requests * hit,
            generated_tokens=before.generated_tokens + requests,
            prefills=before.prefills + requests,
            queried_tokens=before.queried_tokens + requests * prompt,
            hit_tokens=before.hit_tokens + requests * hit,
        )
        if events:
            self.activity.received(requests, now=self.now)


# --- no events


def test_a_pod_that_serves_requests_and_sends_no_events_for_30_s_is_found_with_what_to_do() -> None:
    pod = Pod()
    pod.settled()
    pod.serve(prompt=1000)
    due_at = pod.now + 1
    assert pod.watch(30) == []

    (finding,) = pod.look()
    assert finding == Finding(
        endpoint="10.0.0.1:8000",
        dp_rank=0,
        reason=FindingReason.NO_EVENTS,
        message=finding.message,
        since=UNIX + due_at,
    )
    assert finding.message == (
        "serves requests but has sent no KV events for 33 s, while it has filled at least 61 new blocks of 16 tokens: "
        'check that it runs with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", …}\', '
        "that its events address (--event-sources, or GET /kv_event_sources) is its own, can be reached from here, and "
        "is published by that process"
    )


def test_its_first_event_heals_a_silent_pod() -> None:
    pod = Pod()
    pod.settled()
    pod.serve(prompt=1000)
    assert pod.watch(40) == ["no-events"]
    pod.activity.received(1, now=pod.now)

    assert pod.watch(1) == []
    assert pod.watch(100) == []


@dataclass(frozen=True)
class Load:
    prompt: int
    requests: int = 1
    hit: int = 0
    events: bool = False


@pytest.mark.parametrize(
    "loads",
    [
        pytest.param([], id="an idle pod"),
        pytest.param([Load(prompt=15, requests=7)] * 100, id="prompts that are shorter than a block"),
        pytest.param([Load(prompt=1000, hit=992)] * 100, id="prompts that are in its cache"),
        pytest.param([Load(prompt=1000, events=True)] * 100, id="a pod that sends events"),
    ],
)
def test_it_is_no_finding(loads: Sequence[Load]) -> None:
    pod = Pod()
    pod.settled()
    for load in loads:
        pod.serve(prompt=load.prompt, requests=load.requests, hit=load.hit, events=load.events)
        assert pod.watch(1) == []

    assert pod.watch(120) == []


def test_counters_that_lag_behind_the_events_are_not_taken_for_silence() -> None:
    pod = Pod()
    pod.settled()
    pod.activity.received(1, now=pod.now)
    pod.look()
    pod.serve(prompt=1000)  # the same request, counted when its event has been here

    assert pod.watch(120) == []


def test_what_a_pod_served_before_its_stream_was_ours_is_none_of_our_business() -> None:
    pod = Pod()
    pod.look()
    pod.serve(prompt=1000)  # its event was received by the indexer that had the stream before us

    assert pod.watch(120) == []


@pytest.mark.parametrize("state", [SourceState.LOST, SourceState.REPLAYING, None])
def test_a_stream_that_is_not_live_is_not_judged_by_its_silence(state: SourceState | None) -> None:
    pod = Pod(state=state)
    pod.settled()
    pod.serve(prompt=1000)

    assert "no-events" not in pod.watch(120)


def test_a_restart_of_the_pod_begins_the_count_anew() -> None:
    pod = Pod()
    pod.settled()
    pod.serve(prompt=1000)
    assert pod.watch(20) == []
    pod.counters = replace(IDLE, prompt_tokens=0, prefills=0, queried_tokens=0, hit_tokens=0, cached_prompt_tokens=0)

    assert pod.watch(120) == []


def test_a_restart_is_also_seen_where_the_new_process_has_counted_more_than_the_old() -> None:
    pod = Pod(started_at=1.0)
    pod.settled()
    pod.report = replace(pod.report, started_at=2.0)
    pod.serve(prompt=1000)

    assert pod.watch(120) == []


def test_a_pod_whose_metrics_cannot_be_read_is_not_judged() -> None:
    pod = Pod()
    pod.settled()
    pod.serve(prompt=1000)

    assert [pod.look(answers=False) for _ in range(120)] == [[]] * 120


def test_a_pod_that_publishes_nothing_is_told_how_to_publish() -> None:
    pod = Pod(rank=None, state=None)
    pod.settled()
    pod.serve(prompt=1000)
    pod.watch(30)

    (finding,) = pod.look()
    assert (finding.subject, finding.reason) == ("10.0.0.1:8000", "no-events")
    assert finding.message.endswith(
        "no source of its events is known; start it with --kv-events-config "
        '\'{"enable_kv_cache_events": true, "publisher": "zmq", …}\', and for vLLM < 0.31 name it in --event-sources'
    )


def test_a_pod_without_a_prefix_cache_is_told_to_switch_it_on() -> None:
    pod = Pod(caches_prefixes=False)
    pod.settled()
    pod.serve(prompt=1000)
    pod.watch(30)

    assert [finding.message.partition(": ")[2] for finding in pod.look()] == [
        "its prefix cache is off; start it with --enable-prefix-caching"
    ]


# --- blocks so large that nothing is cached


def test_a_hybrid_model_whose_prompts_never_fill_a_block_is_found_and_explained() -> None:
    pod = Pod(block_size=528)
    pod.gpu_block_size = None
    pod.settled()
    pod.serve(prompt=300, requests=49)
    assert pod.watch(60) == []
    pod.serve(prompt=300)

    (finding,) = pod.look()
    assert finding.reason == "short-prompts"
    assert finding.message == (
        "has served 50 requests of 300 prompt tokens on average without one KV event: its blocks have 528 tokens, and "
        "only full blocks are cached. Hybrid (Mamba, linear attention) models enlarge them. Until prompts are longer, "
        "its requests can be balanced by load only; a smaller --block-size or --prefix-match-unit may help, if this "
        "model takes one"
    )
    pod.activity.received(1, now=pod.now)
    assert pod.watch(1) == []


@pytest.mark.parametrize(("block_size", "hit"), [(16, 0), (528, 100)])
def test_short_prompts_are_no_finding_with_small_blocks_or_where_the_cache_is_hit(block_size: int, hit: int) -> None:
    pod = Pod(block_size=block_size)
    pod.gpu_block_size = None
    pod.settled()
    pod.serve(prompt=min(block_size - 1, 300), requests=200, hit=hit)

    assert pod.watch(60) == []


# --- hits in the pod, nothing in the index


def test_a_pod_whose_cache_is_hit_while_the_index_holds_nothing_is_found_with_the_reason() -> None:
    pod = Pod()
    pod.blocks = 0
    pod.watch(5)
    pod.serve(prompt=1000, hit=992)
    pod.activity.received(1, now=pod.now)
    pod.activity.not_indexed.add("no-group-rule", 7, now=pod.now)
    assert pod.watch(30) == []

    (finding,) = pod.look()
    assert finding.reason == "nothing-indexed"
    assert finding.message == (
        "has found 992 prompt tokens in its own cache, but the index holds none of its blocks; events were left out: "
        "no-group-rule ×7 (see docs/reference/findings.md). Compare its model kind, KV connector and vLLM version "
        "with the supported ones; restart the pod if its first events are lost for good (no replay endpoint)"
    )
    pod.blocks = 1
    assert pod.watch(1) == []


def test_hits_from_before_a_clear_are_no_sign_of_blocks_that_the_index_lacks() -> None:
    pod = Pod()
    pod.watch(5)
    pod.serve(prompt=1000, hit=992)
    pod.blocks = 0
    pod.look()
    pod.serve(prompt=1000, hit=992)  # counters lag
    pod.activity.received(1, now=pod.now)

    assert pod.watch(120) == []


def test_a_silent_pod_whose_cache_is_hit_has_one_finding_and_not_two() -> None:
    pod = Pod()
    pod.blocks = 0
    pod.watch(5)
    for _ in range(60):
        pod.serve(prompt=1000, hit=500)
        found = pod.look()

    assert [finding.reason for finding in found] == ["no-events"]


# --- block sizes


@pytest.mark.parametrize("told", ["not_indexed", "undecodable"])
def test_stores_of_another_block_size_are_found_until_they_have_stopped_for_minutes(told: str) -> None:
    pod = Pod()
    getattr(pod.activity, told).add("block-size-changed", 3, now=pod.now)

    (finding,) = pod.look()
    assert (finding.reason, finding.since) == ("block-size-changed", UNIX + 1000.0)
    assert finding.message == (
        "its store events changed their block size 3 times: the index began this source anew, and leaves out what "
        "differs still. Check that one pod alone publishes at this address, and that all its engines run with one "
        "--block-size; then restart it, or run `kvmesh index clear` for it"
    )
    assert pod.look(seconds=RECENT_SECONDS) == []


def test_an_index_whose_blocks_are_not_of_the_pod_is_found_and_heals() -> None:
    pod = Pod(block_size=32)
    assert pod.watch(30) == []

    (finding,) = pod.look()
    assert finding.reason == "block-size-changed"
    assert finding.message == (
        "the index has blocks of 16 tokens, the pod says 32: the events are another pod's or from before a restart. "
        "Check the addresses in --event-sources (or what GET /kv_event_sources says); then run `kvmesh index clear` "
        "for this source"
    )
    pod.gpu_block_size = 32
    assert pod.watch(1) == []


def test_a_hybrid_pod_may_publish_finer_blocks_than_it_caches() -> None:
    assert Pod(block_size=528, other_block_sizes=frozenset({16})).watch(60) == []


def test_a_pod_that_comes_back_with_another_block_size_is_found_for_some_minutes() -> None:
    pod = Pod()
    pod.look()
    pod.report = replace(pod.report, block_size=32)
    pod.gpu_block_size = 32

    (finding,) = pod.look()
    assert finding.message == (
        "the pod came back with blocks of 32 tokens, before it had 16: nothing that it held counts any more. If that "
        "was not meant, compare its --block-size, model and vLLM version with the other pods'"
    )
    assert pod.look(seconds=RECENT_SECONDS + 1) == []


# --- decode errors


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("malformed-message", "something else than a KV event publisher sends to this address; check --event-sources"),
        (
            "unknown-event-type",
            "its vLLM is probably newer than this kvmesh knows; update kvmesh, or report the version",
        ),
        (
            "undecodable-batch",
            "the payload is no event batch: check that the address is vLLM's and the publisher's format is msgpack",
        ),
        (
            "bad-extra-keys",
            "its vLLM's event format differs from those that this kvmesh knows; update kvmesh, or report the version",
        ),
    ],
)
def test_what_cannot_be_decoded_is_found_with_count_reason_and_likely_cause(reason: str, cause: str) -> None:
    pod = Pod()
    pod.activity.undecodable.add(reason, 2, now=pod.now)
    pod.activity.undecodable.add(reason, 1, now=pod.now + 1)

    (finding,) = pod.look(seconds=2)
    assert finding == Finding(
        endpoint="10.0.0.1:8000",
        dp_rank=0,
        reason=FindingReason.DECODE_ERRORS,
        message=f"3 events or messages could not be understood ({reason} ×3): {cause}. What they said is missing from "
        "the index",
        since=UNIX + 1000.0,
    )
    assert pod.look(seconds=RECENT_SECONDS) == []  # healed


def test_only_the_most_frequent_reasons_are_named_and_their_number_is_bounded() -> None:
    pod = Pod()
    for number in range(100):
        pod.activity.undecodable.add(f"reason-{number:02}", 1 + (number == 7), now=pod.now)

    (finding,) = pod.look()
    assert "could not be understood (other ×68, reason-07 ×2, reason-00 ×1, …)" in finding.message


# --- stuck in replay


def test_a_replay_without_progress_is_found_with_what_to_check_and_heals_by_a_batch_or_its_end() -> None:
    pod = Pod(state=SourceState.REPLAYING)
    assert pod.watch(29) == []

    (finding,) = pod.look()
    assert finding == Finding(
        endpoint="10.0.0.1:8000",
        dp_rank=0,
        reason=FindingReason.STUCK_IN_REPLAY,
        message="has been replaying for 30 s, the last 30 s without a batch: check that its replay address "
        "(replay_endpoint in --kv-events-config) can be reached from here, that the pod is not blocked, and that Redis "
        "keeps up. Until then the index lacks some of its blocks",
        since=UNIX + 1000.0,
    )
    pod.activity.received(5, now=pod.now)
    assert pod.watch(29) == []
    assert pod.watch(1) == ["stuck-in-replay"]
    pod.activity.became(SourceState.LIVE, now=pod.now)
    assert pod.watch(1) == []


def test_a_long_replay_that_makes_progress_is_no_finding() -> None:
    pod = Pod(state=SourceState.REPLAYING)
    for _ in range(50):
        assert pod.watch(20) == []
        pod.activity.received(1, now=pod.now)


@pytest.mark.parametrize("reason", ["slot-share", "no-free-slot", "source-full", "orphan-dropped"])
def test_a_pod_that_wants_more_than_its_share_is_named_with_what_it_wants_too_much_of(reason: str) -> None:
    pod = Pod()
    pod.activity.not_indexed.add(reason, 3, now=pod.now)

    (finding,) = pod.look()
    assert finding.reason is FindingReason.SHARE_REACHED
    assert f"{reason} ×3" in finding.message
    assert pod.look(seconds=RECENT_SECONDS + 1) == []


def test_a_pod_with_more_ranks_than_are_followed_of_one_is_named_while_it_has_them() -> None:
    pod = Pod(rank=None)
    pod.ranks_left_out = 896

    (finding,) = pod.look()
    assert (finding.reason, "last 896 are not" in finding.message) == (FindingReason.SHARE_REACHED, True)
    pod.ranks_left_out = 0
    assert pod.look() == []


def test_a_skipped_batch_is_named() -> None:
    pod = Pod()
    pod.activity.not_indexed.add("batch-skipped", 1, now=pod.now)

    (finding,) = pod.look()
    assert finding.reason is FindingReason.BATCH_SKIPPED
    assert "kvmesh index clear" in finding.message

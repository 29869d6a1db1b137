"""Two rules for what is missing: events that are due and do not come, and blocks that the index should hold.

Pure; used by `finding_rules`. An idle pod, prompts shorter than a block, and prompts that are found in the pod's cache
as a whole owe us nothing.
"""

from kv_indexer.watch.stream_facts import Fault, FindingPolicy, StreamFacts, due_size, is_judged, name_spells
from kvmesh.blocks.findings import FindingReason
from kvmesh.pods.pod_report import EngineCounters, is_restart, least_new_blocks


class Silence:
    """Events are due and do not come."""

    def __init__(self, policy: FindingPolicy) -> None:
        self._policy = policy
        self._before: EngineCounters | None = None  # when the last batch came, or when we began to look
        self._before_at = 0.0
        self._due_since: float | None = None
        self._judged_since: float | None = None
        self._started_at: float | None = None  # of the pod's process, as it says itself

    def judge(self, facts: StreamFacts, *, now: float) -> Fault | None:
        """Return what is wrong at `now` (monotonic seconds), or None."""
        report, counters = facts.report, facts.counters
        if not is_judged(facts) or report is None or counters is None:
            self._before = self._due_since = self._judged_since = None
            return None
        self._judged_since = now if self._judged_since is None else self._judged_since
        heard_at = max(self._judged_since, facts.activity.last_batch_at or 0.0)
        # counters lag: what was read right at a batch may lack the request that the batch came from
        is_too_early = self._before_at < heard_at + self._policy.settle_seconds
        is_another = report.started_at != self._started_at or is_restart(self._before or counters, counters)
        if self._before is None or is_too_early or is_another:
            self._before, self._before_at, self._due_since = counters, report.scraped_at, None
            self._started_at = report.started_at
            return None
        size = due_size(facts, report)
        caches = report.caches_prefixes is not False
        due = least_new_blocks(self._before, counters, block_size=size, caches=caches)
        if due < self._policy.least_blocks:
            return self._short_prompts(facts, counters, size=size, now=now)
        self._due_since = report.scraped_at if self._due_since is None else self._due_since
        if now - self._due_since < self._policy.silent_seconds:
            return None
        seconds = now - heard_at
        served = f"it has filled at least {due} new blocks of {size} tokens"
        message = f"serves requests but has sent no KV events for {seconds:.0f} s, while {served}: {_remedy(facts)}"
        return Fault(reason=FindingReason.NO_EVENTS, message=message, began_at=self._due_since)

    def _short_prompts(self, facts: StreamFacts, counters: EngineCounters, *, size: int, now: float) -> Fault | None:
        """Judge a pod that rightly sends nothing, but for a reason that nobody may be aware of."""
        before, policy = self._before, self._policy
        assert before is not None
        requests = counters.prefills - before.prefills
        if (
            facts.report is None
            or facts.report.block_size is None
            or size < policy.large_block_tokens
            or requests < policy.large_block_requests
            or counters.hit_tokens > before.hit_tokens
            or now - self._before_at < policy.silent_seconds
        ):
            return None
        mean = (counters.prompt_tokens - before.prompt_tokens) // requests
        message = (
            f"has served {requests} requests of {mean} prompt tokens on average without one KV event: its blocks have "
            f"{size} tokens, and only full blocks are cached. Hybrid (Mamba, linear attention) models enlarge them. "
            "Until prompts are longer, its requests can be balanced by load only; a smaller --block-size or "
            "--prefix-match-unit may help, if this model takes one"
        )
        return Fault(reason=FindingReason.SHORT_PROMPTS, message=message, began_at=self._before_at)


class Absence:
    """The pod finds prompts in its cache, and the index holds nothing of it."""

    def __init__(self, policy: FindingPolicy) -> None:
        self._policy = policy
        self._empty_since: float | None = None
        self._before: EngineCounters | None = None
        self._hit_since: float | None = None

    def judge(self, facts: StreamFacts, *, now: float) -> Fault | None:
        """Return what is wrong at `now` (monotonic seconds), or None."""
        report, counters = facts.report, facts.counters
        if facts.dp_rank is None or not is_judged(facts) or facts.blocks or report is None or counters is None:
            self._empty_since = self._before = self._hit_since = None
            return None
        self._empty_since = now if self._empty_since is None else self._empty_since
        if report.scraped_at < self._empty_since + self._policy.settle_seconds:
            return None  # its hits may be older than the clear that emptied it
        if self._before is None or is_restart(self._before, counters):
            self._before, self._hit_since = counters, None
        hits = counters.hit_tokens - self._before.hit_tokens
        if hits < self._policy.least_blocks * due_size(facts, report):
            return None
        self._hit_since = report.scraped_at if self._hit_since is None else self._hit_since
        if now - self._hit_since < self._policy.silent_seconds:
            return None
        reasons = name_spells(facts.activity.not_indexed.lasting(now=now))
        why = f"events were left out: {reasons} (see docs/findings.md)" if reasons else "its stores never came"
        message = (
            f"has found {hits} prompt tokens in its own cache, but the index holds none of its blocks; {why}. Compare "
            "its model kind, KV connector and vLLM version with the supported ones; restart the pod if its first "
            "events are lost for good (no replay endpoint)"
        )
        return Fault(reason=FindingReason.NOTHING_INDEXED, message=message, began_at=self._hit_since)


def _remedy(facts: StreamFacts) -> str:
    """Say what to do about a silent pod."""
    if facts.report is not None and facts.report.caches_prefixes is False:
        return "its prefix cache is off; start it with --enable-prefix-caching"
    config = '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", …}\''
    if facts.dp_rank is None:
        return (
            f"no source of its events is known; start it with {config}, and for vLLM < 0.31 name it in --event-sources"
        )
    return (
        f"check that it runs with {config}, that its events address (--event-sources, or GET /kv_event_sources) is its "
        "own, can be reached from here, and is published by that process"
    )

"""The rules that find faults although nothing has failed, one object per stream. Pure.

A rule reports only when it is sure. A pod that is idle, that serves prompts shorter than a block, or that finds whole
prompts in its cache rightly sends no events. Each message names the fault, then the remedy.
"""

from kv_indexer.watch.stream_activity import (
    RECENT_SECONDS,
    Diagnosis,
    FindingPolicy,
    StreamFacts,
    due_size,
    is_judged,
    name_spells,
)
from kvmesh.blocks.findings import Finding, FindingReason
from kvmesh.blocks.source import SourceState
from kvmesh.pods.pod_report import EngineCounters, PodReport, is_restart, least_new_blocks

# reasons of the applier
BLOCK_SIZE_CHANGED = "block-size-changed"  # for stores of another size within one epoch
BATCH_SKIPPED = "batch-skipped"
SHARES = frozenset({"slot-share", "no-free-slot", "source-full", "orphan-dropped"})


class Silence:
    """Events are due, but do not come."""

    def __init__(self, policy: FindingPolicy) -> None:
        self._policy = policy
        self._before: EngineCounters | None = None  # at the last batch, or when we began to watch
        self._before_at = 0.0
        self._due_since: float | None = None
        self._judged_since: float | None = None
        self._started_at: float | None = None  # of the pod's process, as it reports

    def judge(self, facts: StreamFacts, *, now: float) -> Diagnosis | None:
        """Return the diagnosis at `now` (monotonic seconds), or None."""
        report, counters = facts.report, facts.counters
        if not is_judged(facts) or report is None or counters is None:
            self._before = self._due_since = self._judged_since = None
            return None
        self._judged_since = now if self._judged_since is None else self._judged_since
        heard_at = max(self._judged_since, facts.activity.last_batch_at or 0.0)
        # counters lag: a reading at the time of a batch may lack the request that caused the batch
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
        return Diagnosis(reason=FindingReason.NO_EVENTS, message=message, began_at=self._due_since)

    def _short_prompts(
        self, facts: StreamFacts, counters: EngineCounters, *, size: int, now: float
    ) -> Diagnosis | None:
        """Judge a pod that rightly sends nothing, for a reason that its operator may not know."""
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
        return Diagnosis(reason=FindingReason.SHORT_PROMPTS, message=message, began_at=self._before_at)


class Absence:
    """The pod finds prompts in its cache, but the index holds none of its blocks."""

    def __init__(self, policy: FindingPolicy) -> None:
        self._policy = policy
        self._empty_since: float | None = None
        self._before: EngineCounters | None = None
        self._hit_since: float | None = None

    def judge(self, facts: StreamFacts, *, now: float) -> Diagnosis | None:
        """Return the diagnosis at `now` (monotonic seconds), or None."""
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
        left_out = f"events were left out: {reasons} (see docs/reference/findings.md)"
        why = left_out if reasons else "its stores never came"
        message = (
            f"has found {hits} prompt tokens in its own cache, but the index holds none of its blocks; {why}. Compare "
            "its model kind, KV connector and vLLM version with the supported ones; restart the pod if its first "
            "events are lost for good (no replay endpoint)"
        )
        return Diagnosis(reason=FindingReason.NOTHING_INDEXED, message=message, began_at=self._hit_since)


def _remedy(facts: StreamFacts) -> str:
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


class StreamRules:
    """Judges one stream, and remembers the values to compare with."""

    def __init__(self, policy: FindingPolicy) -> None:
        self._policy = policy
        self._silence = Silence(policy)
        self._absence = Absence(policy)
        self._sizes = _BlockSizes(policy)

    def judge(self, facts: StreamFacts, *, now: float, unix_now: float) -> list[Finding]:
        """Return the findings at `now` (monotonic seconds), with the start of each in unix seconds."""
        silence = self._silence.judge(facts, now=now)
        absence = self._absence.judge(facts, now=now)
        diagnoses = [
            silence or absence,  # a pod that sends nothing has nothing indexed: the cause is enough
            self._sizes.judge(facts, now=now),
            _decode_errors(facts, now=now),
            _stuck_in_replay(facts, now=now, policy=self._policy),
            _share_reached(facts, now=now),
            _batch_skipped(facts, now=now),
        ]
        return [
            Finding(
                endpoint=facts.endpoint,
                dp_rank=facts.dp_rank,
                reason=diagnosis.reason,
                message=diagnosis.message,
                since=unix_now - (now - diagnosis.began_at),
            )
            for diagnosis in diagnoses
            if diagnosis is not None
        ]


class _BlockSizes:
    """The pod's block size differs from the index's, or from its earlier one."""

    def __init__(self, policy: FindingPolicy) -> None:
        self._policy = policy
        self._last_size: int | None = None
        self._change: tuple[int, int, float] | None = None  # from, to, when
        self._differs_since: float | None = None

    def judge(self, facts: StreamFacts, *, now: float) -> Diagnosis | None:
        self._note_size(facts.report)
        return self._in_events(facts, now=now) or self._in_index(facts, now=now) or self._in_report(now=now)

    def _note_size(self, report: PodReport | None) -> None:
        if report is None or report.block_size is None:
            return
        if self._last_size not in (None, report.block_size):
            self._change = (self._last_size or 0, report.block_size, report.scraped_at)
        self._last_size = report.block_size

    def _in_events(self, facts: StreamFacts, *, now: float) -> Diagnosis | None:
        activity = facts.activity
        spell = activity.not_indexed.lasting(now=now).get(BLOCK_SIZE_CHANGED)
        spell = spell or activity.undecodable.lasting(now=now).get(BLOCK_SIZE_CHANGED)
        if spell is None:
            return None
        message = (
            f"its store events changed their block size {spell.count} times: the index began this source anew, and "
            "leaves out what differs still. Check that one pod alone publishes at this address, and that all its "
            "engines run with one --block-size; then restart it, or run `kvmesh index clear` for it"
        )
        return Diagnosis(reason=FindingReason.BLOCK_SIZE_CHANGED, message=message, began_at=spell.began_at)

    def _in_index(self, facts: StreamFacts, *, now: float) -> Diagnosis | None:
        report, indexed = facts.report, facts.gpu_block_size
        known = {report.block_size, *report.other_block_sizes} if report is not None and report.block_size else set()
        if not known or indexed is None or not is_judged(facts) or indexed in known:
            self._differs_since = None
            return None
        self._differs_since = now if self._differs_since is None else self._differs_since
        if now - self._differs_since < self._policy.silent_seconds:
            return None
        message = (
            f"the index has blocks of {indexed} tokens, the pod says {report.block_size if report else 0}: the events "
            "are another pod's or from before a restart. Check the addresses in --event-sources (or what GET "
            "/kv_event_sources says); then run `kvmesh index clear` for this source"
        )
        return Diagnosis(reason=FindingReason.BLOCK_SIZE_CHANGED, message=message, began_at=self._differs_since)

    def _in_report(self, *, now: float) -> Diagnosis | None:
        if self._change is None or now - self._change[2] > RECENT_SECONDS:
            return None
        before, after, changed_at = self._change
        message = (
            f"the pod came back with blocks of {after} tokens, before it had {before}: nothing that it held counts any "
            "more. If that was not meant, compare its --block-size, model and vLLM version with the other pods'"
        )
        return Diagnosis(reason=FindingReason.BLOCK_SIZE_CHANGED, message=message, began_at=changed_at)


def _share_reached(facts: StreamFacts, *, now: float) -> Diagnosis | None:
    if facts.ranks_left_out:
        message = (
            f"announces more data-parallel ranks than are followed of one pod: the last {facts.ranks_left_out} are not "
            "in the index. If it really has as many, give its engines ports of their own (targetPorts of the pool)"
        )
        return Diagnosis(reason=FindingReason.SHARE_REACHED, message=message, began_at=now)
    spells = {
        reason: spell for reason, spell in facts.activity.not_indexed.lasting(now=now).items() if reason in SHARES
    }
    if not spells:
        return None
    message = (
        f"wants more of the index than one pod may have ({name_spells(spells)}): what is beyond its share is left out. "
        "docs/reference/redis.md names the shares; look for a pod that clears its cache all the time, has many ranks "
        "and tiers, or has lost the beginning of its history (buffer_steps in --kv-events-config)"
    )
    began_at = min(spell.began_at for spell in spells.values())
    return Diagnosis(reason=FindingReason.SHARE_REACHED, message=message, began_at=began_at)


def _batch_skipped(facts: StreamFacts, *, now: float) -> Diagnosis | None:
    spell = facts.activity.not_indexed.lasting(now=now).get(BATCH_SKIPPED)
    if spell is None:
        return None
    message = (
        f"{spell.count} batches could not be applied, twice each, while the index served others: they were skipped, "
        "and the blocks of the stream before them were let go. The indexer's log has the errors: report them with the "
        "pod's version. `kvmesh index clear` for this source begins anew"
    )
    return Diagnosis(reason=FindingReason.BATCH_SKIPPED, message=message, began_at=spell.began_at)


def _decode_errors(facts: StreamFacts, *, now: float) -> Diagnosis | None:
    spells = facts.activity.undecodable.lasting(now=now)
    spells = {reason: spell for reason, spell in spells.items() if reason != BLOCK_SIZE_CHANGED}
    if not spells:
        return None
    count = sum(spell.count for spell in spells.values())
    message = (
        f"{count} events or messages could not be understood ({name_spells(spells)}): {_likely_cause(set(spells))}. "
        "What they said is missing from the index"
    )
    began_at = min(spell.began_at for spell in spells.values())
    return Diagnosis(reason=FindingReason.DECODE_ERRORS, message=message, began_at=began_at)


def _likely_cause(reasons: set[str]) -> str:
    if "malformed-message" in reasons:
        return "something else than a KV event publisher sends to this address; check --event-sources"
    if "unknown-event-type" in reasons:
        return "its vLLM is probably newer than this kvmesh knows; update kvmesh, or report the version"
    if "undecodable-batch" in reasons:
        return "the payload is no event batch: check that the address is vLLM's and the publisher's format is msgpack"
    return "its vLLM's event format differs from those that this kvmesh knows; update kvmesh, or report the version"


def _stuck_in_replay(facts: StreamFacts, *, now: float, policy: FindingPolicy) -> Diagnosis | None:
    activity = facts.activity
    if activity.state is not SourceState.REPLAYING:
        return None
    began_at = max(activity.state_since, activity.last_batch_at or 0.0)
    if now - began_at < policy.stuck_seconds:
        return None
    message = (
        f"has been replaying for {now - activity.state_since:.0f} s, the last {now - began_at:.0f} s without a batch: "
        "check that its replay address (replay_endpoint in --kv-events-config) can be reached from here, that the pod "
        "is not blocked, and that Redis keeps up. Until then the index lacks some of its blocks"
    )
    return Diagnosis(reason=FindingReason.STUCK_IN_REPLAY, message=message, began_at=began_at)

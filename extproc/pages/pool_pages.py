"""One pool as its picker sees it, for all pages: endpoints, classes, index, decisions, explanations. Changes nothing.

Read from the pool's picker when it is asked for. Beside it, only the tree of prefixes that were routed lately is kept.
"""

import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from msgspec import structs

from extproc.choosing.candidates import unhealthy_endpoints
from extproc.choosing.choose import any_request
from extproc.doctor.findings import Finding
from extproc.errors import PickError
from extproc.ext_proc.exchange import RequestFacts
from extproc.pages.decision_state import admission_state, decision_state, rounded, with_candidates
from extproc.pages.decision_words import why
from extproc.pages.history_state import HistoryEvent, history_state
from extproc.pages.picker_state import (
    ClassesEvent,
    ClassState,
    DecisionState,
    EndpointState,
    FindingState,
    IndexEvent,
    IndexState,
    MeasuredState,
    MissingInput,
    PickerState,
    PodsEvent,
    PolicyState,
    PoolState,
    StepState,
)
from extproc.pages.prefix_pages import PrefixWatch
from extproc.pages.scale_state import scale_state
from extproc.pages.stopped_pod import stopped
from extproc.pick import explain
from extproc.pods.endpoint import EndpointStatus, Role
from extproc.policy.priority import PriorityClass
from extproc.policy.values import PickPolicy
from extproc.pools.decision_headers import new_decision_id
from extproc.pools.pool import Pool
from extproc.prefixes.prefix_index import NO_INDEXER
from extproc.records.request_events import DecisionRecord
from extproc.slo.attainment import Attainment
from kvmesh.blocks.cache_groups import is_of_group
from kvmesh.blocks.source import WORST_FIRST, IndexStatus, SourceStatus
from kvmesh.metrics.registry import Histogram
from kvmesh.pods.page_steps import Steps

SHOWN_DECISIONS = 50  # in the state
COMPARED = 2  # candidates: the winner and the best of the others
MOST_PODS = 1000
MOST_SOURCES = 500
MOST_FINDINGS = 200
MOST_UNREADABLE = 20
_SUMMED = ("cached_blocks", "cached_tokens", "running", "waiting", "bookings", "picks")


class PoolPages:
    """The pages of one pool. `index` is the pool's part of the index as it stands, or why it cannot be read."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._said: dict[str, str] = {}  # why, by the decisions that were shown last
        self.prefixes = PrefixWatch(
            shows_text=lambda: self.policy.observability.show_prompt_text, clock=time.monotonic, random=random.random
        )

    @property
    def policy(self) -> PickPolicy:
        """The policy in force."""
        return self.pool.config.policy

    def line(self) -> PoolState:
        """Return the pool in short."""
        config = self.pool.config
        return PoolState(
            pool=config.name,
            endpoints=len(config.endpoints),
            ready=sum(endpoint.ready and not endpoint.terminating for endpoint in config.endpoints),
            prefill=sum(role is Role.PREFILL for role in config.policy.roles.values()),
            open_requests=self.pool.books.open_requests,
            waiting=sum(self.pool.runtime.admission.waiting.values()),
            hosts=sorted(config.hosts),
            model=config.model,
            policies=sorted(set(config.origins.values())),
            shadow=config.policy.shadow,
        )

    def statuses(self) -> Sequence[EndpointStatus]:
        """Return the endpoints as they are known now."""
        return self.pool.endpoints.known(now=time.monotonic())

    def policy_state(self) -> PolicyState:
        """Return what of the policy the page shows or goes by."""
        shown = self.policy.observability
        return PolicyState(
            strategy=self.policy.strategy.value,
            weights=dict(self.policy.weights),
            show_prompt_text=shown.show_prompt_text,
            gpu_hour_price=shown.gpu_hour_price,
            currency=shown.currency,
        )

    def state(self, index: IndexStatus | str, *, findings: Sequence[Finding] | None) -> PickerState:
        """Return the whole pool; `findings`: of the checks at start-up, None before they are done."""
        state, problem = _trust(index)
        return PickerState(
            now=time.time(),
            endpoints=self._endpoints(index),
            index=IndexState(state=state, problem=problem, sources=0 if isinstance(index, str) else len(index.sources)),
            classes=self.classes().classes,
            scale=[scale_state(signal, self.pool.scale.acts) for signal in self.pool.scale.signals.values()],
            quotas=self.pool.quotas.facts(),
            token_sources=self.pool.tokens.watch.sources,
            token_states={
                model: (state.verdict.value, state.why) for model, state in self.pool.tokens.checks.states.items()
            },
            replicas=self._replicas(),
            findings=None if findings is None else [_finding(finding) for finding in findings],
            decisions=self._in_short(list(islice(self.pool.runtime.recent, SHOWN_DECISIONS))),
            shadow=self.policy.shadow,
            ttft=_added_up(
                histogram
                for (_, role), histogram in self.pool.telemetry.latencies.ttft.series.items()
                if role != Role.PREFILL  # a leg's first token is no client's, whose request its decode pod counts
            ),
        )

    def _in_short(self, records: Sequence[DecisionRecord]) -> list[DecisionState]:
        """Return decisions without their candidates, which are compared once for each record."""
        said: dict[str, str] = {}
        shown = []
        for record in records:
            short = decision_state(record, policy=self.policy, most=0)
            words = self._said.get(short.id)
            if words is None:
                words = why(decision_state(record, policy=self.policy, most=COMPARED))
            said[short.id] = words
            shown.append(structs.replace(short, why=words))
        self._said = said
        return shown

    def endpoints(self, index: IndexStatus | str) -> PodsEvent:
        """Return a line for each endpoint, in the order in which they are configured, and their sums."""
        pods = self._endpoints(index)
        totals = {name: sum(getattr(pod, name) or 0 for pod in pods) for name in _SUMMED}
        return PodsEvent(
            now=time.time(),
            pods=pods[:MOST_PODS],
            left_out=max(len(pods) - MOST_PODS, 0),
            totals={"pods": len(pods), "ready": sum(pod.state == "ready" for pod in pods), **totals},
        )

    def classes(self) -> ClassesEvent:
        """Return a line for each class, the most important first, and what became of the last requests."""
        now, pool = time.monotonic(), self.pool
        steps: dict[str, list[StepState]] = {}
        for entry in pool.degradation.in_force(now=now):
            steps.setdefault(entry.class_name, []).append(
                StepState(
                    step=entry.step.step.value,
                    model_pool=entry.pool,
                    since_seconds=round(max(now - entry.since, 0.0), 1),
                    pressure=round(entry.pressure, 2),
                )
            )
        refusals = Counter(each.outcome.reason for each in pool.runtime.recent if isinstance(each.outcome, PickError))
        routed = Counter(
            each.asked.request_class.class_name
            for each in pool.runtime.recent
            if each.asked is not None and not isinstance(each.outcome, PickError)
        )
        waiting, for_pod = pool.runtime.admission.waiting, pool.first_pod.waiting
        ordered = sorted(self.policy.priorities.classes.items(), key=lambda item: (-item[1].priority, item[0]))
        return ClassesEvent(
            now=time.time(),
            waiting=sum(waiting.values()),
            remembered=len(pool.runtime.recent),
            classes=[
                _class_state(
                    name,
                    item,
                    pool.telemetry.slo.attainment(name),
                    waiting=waiting.get(name, 0),
                    waiting_for_pod=for_pod.get(name, 0),
                    steps=steps.get(name, []),
                    routed=routed[name],
                )
                for name, item in ordered
            ],
            refusals=refusals,
            quotas=pool.quotas.facts(),
            shadow=self.policy.shadow,
        )

    def history(self, *, picker: str, pool: str) -> Steps[HistoryEvent]:
        """Return the last 15 minutes as this picker, of that name, has kept them; `pool`: the name that is shown."""
        return history_state(
            self.pool.telemetry.history,
            pool=pool,
            picker=picker,
            sample_share=self.pool.runtime.sample_share,
            now=time.monotonic(),
            unix_now=time.time(),
        )

    def index(self, index: IndexStatus | str, *, findings: Sequence[Finding] | None) -> IndexEvent:
        """Return how the index stands, and what indexers and picker have found; `findings` as for `state`."""
        state, problem = _trust(index)
        if isinstance(index, str):
            index = IndexStatus(sources=(), indexer_alive=False, unreadable=())
        found = [
            FindingState(
                check=each.reason,
                severity="error",
                subject=each.subject,
                seen=each.message,
                since=each.since,
                found_by="indexer",
            )
            for each in index.findings
        ]
        return IndexEvent(
            now=time.time(),
            state=state,
            problem=problem,
            indexer_alive=index.indexer_alive,
            sources_count=len(index.sources),
            sources=list(index.sources[:MOST_SOURCES]),
            left_out=max(len(index.sources) - MOST_SOURCES, 0),
            unreadable=list(index.unreadable[:MOST_UNREADABLE]),
            findings=[*found, *self._own_findings(), *map(_finding, findings or ())][:MOST_FINDINGS],
            findings_state="not-yet" if findings is None else "done",
            replicas=self._replicas(),
            degraded=_missing(self.pool.runtime.recent),
        )

    def decisions(self, *, limit: int, request_id: str | None, decision_id: str | None = None) -> list[DecisionState]:
        """Return the last decisions with all that they rest on, newest first; of one request, or one, where named."""
        wanted = (
            each
            for each in self.pool.runtime.recent
            if request_id in (None, each.facts.request_id) and decision_id in (None, each.id)
        )
        return [decision_state(record, policy=self.policy) for record in islice(wanted, limit)]

    async def explain(self, facts: RequestFacts, body: bytes, index: IndexStatus | str) -> DecisionState:
        """Decide without booking, and return what the decision rests on."""
        try:
            picked, preview = await explain(facts, body, self.pool.runtime)
        except PickError as refusal:
            record = DecisionRecord(at=time.time(), id=new_decision_id(), facts=facts, model=None, outcome=refusal)
            refused = decision_state(record, policy=self.policy)
            return with_candidates(refused, any_request(self.pool.runtime.view, now=time.monotonic()))
        asked, sources = picked.prepared.summary, () if isinstance(index, str) else index.sources
        shown = decision_state(
            DecisionRecord(
                at=time.time(),
                id=new_decision_id(),
                facts=facts,
                model=asked.model,
                outcome=picked.decision,
                asked=asked,
                prefill=picked.prefill,
                shadow=picked.withheld,
            ),
            policy=self.policy,
            blocks={source.endpoint: source.block_size for source in sources if source.block_size},
            rooms=preview.rooms,
        )
        attained = self.pool.telemetry.slo.attainment(asked.request_class.class_name)
        return structs.replace(shown, admission=admission_state(picked.prepared.asked, preview, attained))

    def _endpoints(self, index: IndexStatus | str) -> list[EndpointState]:
        now, books = time.monotonic(), self.pool.books
        statuses = self.statuses()
        sources: dict[str, list[SourceStatus]] = {}
        for source in () if isinstance(index, str) else index.sources:
            sources.setdefault(source.endpoint, []).append(source)
        avoided = {
            **unhealthy_endpoints(
                statuses,
                health=books.health,
                policy=self.policy,
                tokens_per_second=books.bookings.tokens_per_second,
                now=now,
            ),
            **dict.fromkeys(self.policy.cordoned, "cordoned"),
        }
        troubles, ahead = self.pool.endpoints.troubles(), time.time() - now
        bookings, errors, all_picks = books.bookings.by_endpoint(), books.estimates.errors(), sum(books.picks.values())
        lines = []
        for status in statuses:
            address, picks = status.address, books.picks.get(status.address, 0)
            error = errors.get(address)
            lines.append(
                _endpoint(
                    status,
                    sources.get(address, ()),
                    bookings=bookings.get(address, 0),
                    picks=picks,
                    share=picks / all_picks if all_picks else 0.0,
                    avoided=avoided.get(address),
                    **stopped(status, troubles.get(address), books.health.avoided_times(address), ahead=ahead),
                    role=self.policy.roles.get(address, Role.BOTH).value,
                    ttft_estimate_error_ms=None if error is None else round(error.mean_seconds * 1000),
                )
            )
        return lines

    def _replicas(self) -> dict[str, Any] | None:
        return self.pool.books.shared.facts() if self.pool.books.shared is not None else None

    def _own_findings(self) -> list[FindingState]:
        """Return which predictions never come true, and who has no tokens: what has been said in the log, too."""
        books = self.pool.books
        return [
            FindingState(check=finding.reason, severity="error", subject=subject, seen=finding.message)
            for findings in (books.matches.findings, books.realised_watch.findings)
            for subject, finding in findings.items()
        ] + [
            FindingState(check=finding.reason, severity="error", subject=finding.model, seen=finding.message)
            for finding in self.pool.tokens.reporter.findings.values()
        ]


def _trust(index: IndexStatus | str) -> tuple[str, str | None]:
    """Return how far the index can be relied on, in a word and, where there is something to say, in a sentence."""
    if isinstance(index, str):
        return "unavailable", index
    return ("ok", None) if index.indexer_alive else ("stale", NO_INDEXER)


def _added_up(histograms: Iterable[Histogram]) -> MeasuredState:
    """Return the sums of histograms of one metric."""
    series = list(histograms)
    if not series:
        return MeasuredState()
    return MeasuredState(
        bounds=series[0].bounds, counts=[sum(same) for same in zip(*(h.counts for h in series), strict=True)]
    )


def _endpoint(status: EndpointStatus, sources: Sequence[SourceStatus], **known_here: Any) -> EndpointState:
    """Return a pod with what it reports, what the index has of it and `known_here`: fields that only the picker has."""
    load, models = status.load, status.models
    tiers: dict[str, int] = {}
    for source in sources:
        if source.tier is not None:
            tiers[source.tier] = tiers.get(source.tier, 0) + source.cached_blocks
    # other cache groups of a hybrid model hold blocks of the same prompts
    counted = [source for source in sources if not is_of_group(source.tier)] or sources
    worst = min(sources, key=lambda source: WORST_FIRST.index(source.state), default=None)
    return EndpointState(
        address=status.address,
        state=status.reachability.value,
        cached_blocks=sum(source.cached_blocks for source in counted),
        running=load.running_requests if load else None,
        waiting=load.waiting_requests if load else None,
        kv_usage=load.kv_usage if load else None,
        hit_rate=load.prefix_hit_rate if load else None,
        models=sorted(models.models) if models else None,
        adapters=sorted(models.adapters) if models else None,
        max_model_len=models.max_model_len if models else None,
        prefill_tokens_per_second=rounded(status.trend.prefill_tokens_per_second),
        inter_token_ms=rounded(status.trend.inter_token_seconds, times=1000.0),
        tiers=tiers,
        cached_tokens=sum(source.cached_blocks * (source.block_size or 0) for source in counted),
        block_tokens=min((source.block_size for source in counted if source.block_size), default=None),
        index_state=worst.state.value if worst is not None else None,
        index_reason=worst.reason if worst is not None else "",
        **known_here,
    )


def _finding(finding: Finding) -> FindingState:
    return FindingState(
        check=finding.check,
        severity=finding.severity.value,
        subject=finding.subject,
        seen=finding.seen,
        fix=finding.fix,
    )


def _missing(recent: Sequence[DecisionRecord]) -> list[MissingInput]:
    """Return what the last decisions lacked, the most frequent first."""
    lines: dict[str, MissingInput] = {}
    for record in recent:  # newest first
        if not isinstance(record.outcome, PickError):
            for reason, words in record.outcome.degraded.items():
                line = lines.get(reason, MissingInput(reason=reason, words=words, last_at=record.at, count=0))
                lines[reason] = structs.replace(line, count=line.count + 1)
    return sorted(lines.values(), key=lambda line: -line.count)


def _class_state(
    name: str,
    item: PriorityClass,
    attained: Attainment | None,
    *,
    waiting: int,
    waiting_for_pod: int,
    steps: Sequence[StepState],
    routed: int,
) -> ClassState:
    targets = item.targets
    return ClassState(
        name=name,
        priority=item.priority,
        sheddable=item.sheddable,
        target_ttft_ms=round(targets.ttft_seconds * 1000),
        target_inter_token_ms=targets.inter_token_seconds * 1000,
        objective=item.objective,
        attainment=attained.share if attained is not None else None,
        judged=attained.judged if attained is not None else 0,
        waiting=waiting,
        waiting_for_pod=waiting_for_pod,
        steps=sorted({line.step for line in steps}),
        in_force=steps,
        routed=routed,
    )

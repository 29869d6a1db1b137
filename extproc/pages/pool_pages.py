"""One pool as its picker sees it, for all pages: endpoints, classes, index, decisions, explanations. Read-only.

Read from the running pool on demand. The only state of its own is the tree of recently routed prefixes.
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
from extproc.errors import PickError
from extproc.ext_proc.exchange import RequestFacts
from extproc.ledger.facts import DecisionRecord, NoDecision
from extproc.pages.decision_state import admission_state, decision_state, with_candidates
from extproc.pages.decision_words import why
from extproc.pages.findings import Finding
from extproc.pages.history_state import HistoryEvent, history_state
from extproc.pages.picker_state import (
    ClassesEvent,
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
from extproc.pages.pod_states import class_state, pod_state, scale_state, stopped
from extproc.pages.prefix_pages import PrefixWatch
from extproc.pick import explain
from extproc.pods.endpoint import EndpointStatus, Role
from extproc.policy.values import PickPolicy
from extproc.pools.plan_response import new_decision_id
from extproc.pools.pool import Pool
from extproc.prefixes.prefix_index import NO_INDEXER
from kvmesh.blocks.source import IndexStatus, SourceStatus
from kvmesh.metrics.registry import Histogram
from kvmesh.pods.page_steps import Steps

SHOWN_DECISIONS = 50  # in the state
COMPARED = 2  # candidates: the winner and the best other one
MOST_PODS = 1000
MOST_SOURCES = 500
MOST_FINDINGS = 200
MOST_UNREADABLE = 20
_SUMMED = ("cached_blocks", "cached_tokens", "running", "waiting", "bookings", "picks")


class PoolPages:
    """The pages of one pool. `index` is the current state of the pool's part of the index, or why it is unreadable."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._said: dict[str, str] = {}  # decision id -> explanation, of the last shown decisions
        self.prefixes = PrefixWatch(
            shows_text=lambda: self.policy.observability.show_prompt_text, clock=time.monotonic, random=random.random
        )

    @property
    def policy(self) -> PickPolicy:
        """The current policy."""
        return self.pool.config.policy

    def line(self) -> PoolState:
        """Return the pool's summary."""
        config = self.pool.given
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
        """Return the endpoints' current status."""
        return self.pool.endpoints.known(now=time.monotonic())

    def policy_state(self) -> PolicyState:
        """Return the part of the policy that the page needs."""
        shown = self.policy.observability
        return PolicyState(
            strategy=self.policy.strategy.value,
            weights=dict(self.policy.weights),
            show_prompt_text=shown.show_prompt_text,
            pod_hour_price=shown.pod_hour_price,
            currency=shown.currency,
        )

    def state(self, index: IndexStatus | str, *, findings: Sequence[Finding] | None) -> PickerState:
        """Return the whole pool; `findings` come from the checks at start-up, None before they are done."""
        state, problem = _trust(index)
        return PickerState(
            now=time.time(),
            endpoints=self._endpoints(index),
            index=IndexState(state=state, problem=problem, sources=0 if isinstance(index, str) else len(index.sources)),
            classes=self.classes().classes,
            scale=[scale_state(signal) for signal in self.pool.scale.signals.values()],
            quotas=self.pool.quotas.facts(),
            token_sources=self.pool.tokens.watch.sources,
            token_states={
                model: (state.verdict.value, state.why) for model, state in self.pool.tokens.checks.states.items()
            },
            replicas=self._replicas(),
            findings=None if findings is None else [_finding(finding) for finding in findings],
            decisions=self._in_short(list(islice(self.pool.telemetry.recent, SHOWN_DECISIONS))),
            shadow=self.policy.shadow,
            ttft=_added_up(
                histogram
                for (_, role), histogram in self.pool.telemetry.latencies.ttft.series.items()
                if role != Role.PREFILL  # a leg's first token is not the client's; the decode pod counts the request
            ),
        )

    def _in_short(self, records: Sequence[DecisionRecord]) -> list[DecisionState]:
        """Return decisions without candidates; the explanation is computed once per record."""
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
        """Return a line per endpoint, in configured order, and the totals."""
        pods = self._endpoints(index)
        totals = {name: sum(getattr(pod, name) or 0 for pod in pods) for name in _SUMMED}
        return PodsEvent(
            now=time.time(),
            pods=pods[:MOST_PODS],
            left_out=max(len(pods) - MOST_PODS, 0),
            totals={"pods": len(pods), "ready": sum(pod.state == "ready" for pod in pods), **totals},
        )

    def classes(self) -> ClassesEvent:
        """Return a line per class, by descending priority, and the outcomes of the last requests."""
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
        refusals = Counter(
            each.outcome.reason for each in pool.telemetry.recent if isinstance(each.outcome, NoDecision)
        )
        routed = Counter(
            each.asked.request_class.class_name
            for each in pool.telemetry.recent
            if each.asked is not None and not isinstance(each.outcome, NoDecision)
        )
        waiting, for_pod = pool.runtime.admission.waiting, pool.first_pod.waiting
        ordered = sorted(self.policy.priorities.classes.items(), key=lambda item: (-item[1].priority, item[0]))
        return ClassesEvent(
            now=time.time(),
            waiting=sum(waiting.values()),
            remembered=len(pool.telemetry.recent),
            classes=[
                class_state(
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
        """Return this picker's last 15 minutes; `picker` is its name, `pool` the displayed name."""
        return history_state(
            self.pool.telemetry.history,
            pool=pool,
            picker=picker,
            sample_share=self.pool.runtime.sample_share,
            now=time.monotonic(),
            unix_now=time.time(),
        )

    def index(self, index: IndexStatus | str, *, findings: Sequence[Finding] | None) -> IndexEvent:
        """Return the state of the index, and the findings of indexers and picker; `findings` as for `state`."""
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
            degraded=_missing(self.pool.telemetry.recent),
        )

    def decisions(self, *, limit: int, request_id: str | None, decision_id: str | None = None) -> list[DecisionState]:
        """Return the last decisions with their full basis, newest first; optionally of one request or decision id."""
        wanted = (
            each
            for each in self.pool.telemetry.recent
            if request_id in (None, each.facts.request_id) and decision_id in (None, each.id)
        )
        return [decision_state(record, policy=self.policy) for record in islice(wanted, limit)]

    async def explain(self, facts: RequestFacts, body: bytes, index: IndexStatus | str) -> DecisionState:
        """Decide without booking, and return the decision with its basis."""
        try:
            picked, preview = await explain(facts, body, self.pool.runtime)
        except PickError as refusal:
            record = DecisionRecord(
                at=time.time(), id=new_decision_id(), facts=facts, model=None, outcome=NoDecision.of(refusal)
            )
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
            blocks={
                name: source.block_size
                for source in sources
                if source.block_size
                for name in (source.endpoint, source.stream.name)
            },
            rooms=preview.rooms,
        )
        attained = self.pool.telemetry.slo.attainment(asked.request_class.class_name)
        return structs.replace(shown, admission=admission_state(picked.prepared.asked, preview, attained))

    def _endpoints(self, index: IndexStatus | str) -> list[EndpointState]:
        now, books = time.monotonic(), self.pool.books
        statuses = self.statuses()
        sources: dict[str, list[SourceStatus]] = {}
        for source in () if isinstance(index, str) else index.sources:
            for name in (source.endpoint, source.stream.name):
                sources.setdefault(name, []).append(source)
        avoided = {
            **unhealthy_endpoints(
                statuses,
                health=books.health,
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
                pod_state(
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
        """Return the findings about wrong predictions and missing tokens, which are also logged."""
        return [
            FindingState(check=finding.reason, severity="error", subject=subject, seen=finding.message)
            for subject, finding in self.pool.books.realised_watch.findings.items()
        ] + [
            FindingState(check=finding.reason, severity="error", subject=finding.model, seen=finding.message)
            for finding in self.pool.tokens.reporter.findings.values()
        ]


def _trust(index: IndexStatus | str) -> tuple[str, str | None]:
    if isinstance(index, str):
        return "unavailable", index
    return ("ok", None) if index.indexer_alive else ("stale", NO_INDEXER)


def _added_up(histograms: Iterable[Histogram]) -> MeasuredState:
    """Return the sum of histograms of one metric."""
    series = list(histograms)
    if not series:
        return MeasuredState()
    return MeasuredState(
        bounds=series[0].bounds, counts=[sum(same) for same in zip(*(h.counts for h in series), strict=True)]
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
    lines: dict[str, MissingInput] = {}
    for record in recent:  # newest first
        if not isinstance(record.outcome, NoDecision):
            for reason, words in record.outcome.degraded.items():
                line = lines.get(reason, MissingInput(reason=reason, words=words, last_at=record.at, count=0))
                lines[reason] = structs.replace(line, count=line.count + 1)
    return sorted(lines.values(), key=lambda line: -line.count)

"""The status of every policy, kept up to date: only what has changed is looked at again. Called by `mesh_policy`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from extproc.policy.inference_policy import KIND, InferencePolicy
from extproc.policy.intake import Held
from extproc.policy.status import (
    ACCEPTED,
    FALSE,
    INVALID,
    Condition,
    Findings,
    PolicyStatus,
    conditions_in,
    conditions_of,
    is_written,
)
from kvmesh.documents.documents import Document, DocumentProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A status, what it was made of, and whether its document says so already."""

    findings: Findings
    document: Document
    status: PolicyStatus
    is_written: bool


@dataclass(slots=True)
class StatusBook:
    """What was last said of each policy; it keeps the times of conditions until a document has them."""

    _kept: dict[str, _Kept] = field(default_factory=dict)

    def update(
        self, policies: Mapping[str, Held[InferencePolicy]], findings: Mapping[str, Findings], *, now: datetime
    ) -> None:
        """Take in what is known now of each policy."""
        time = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        before, self._kept = self._kept, {}
        for source, held in policies.items():
            known = before.get(source)
            if known is None or known.findings is not findings[source] or known.document is not held.document:
                known = _kept(held, findings[source], known.status if known else None, time)
            self._kept[source] = known

    def statuses(self) -> dict[str, PolicyStatus]:
        """Return all of them, by "namespace/name"."""
        return {source: kept.status for source, kept in self._kept.items()}

    def unwritten(self) -> tuple[PolicyStatus, ...]:
        """Return those whose document says something else."""
        return tuple(kept.status for kept in self._kept.values() if not kept.is_written)


def refusals(statuses: Iterable[PolicyStatus]) -> Iterator[DocumentProblem]:
    """Yield the policies that are not accepted: in a folder nobody reads a status."""
    for status in statuses:
        for condition in status.conditions:
            if condition.type == ACCEPTED and condition.status == FALSE:
                reason = "policy-not-valid" if condition.reason == INVALID else "policy-target-not-found"
                yield DocumentProblem(reason=reason, where=f"{KIND} {status.source}", words=condition.message)


def _kept(held: Held[InferencePolicy], findings: Findings, before: PolicyStatus | None, time: str) -> _Kept:
    namespace, _, name = held.source.partition("/")
    wanted = PolicyStatus(
        namespace=namespace,
        name=name,
        uid=held.uid,
        observed_generation=held.generation,
        conditions=conditions_of(findings, generation=held.generation),
    )
    ours: tuple[Condition, ...] = before.conditions if before is not None and before.uid == held.uid else ()
    status = wanted.since(conditions_in(held.document), ours, now=time)
    if before == status and before is not None:
        status = before
    written = is_written(status, held.document)
    return _Kept(findings=findings, document=held.document, status=status, is_written=written)

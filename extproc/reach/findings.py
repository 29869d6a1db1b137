"""The findings on each policy, gathered from all pools where it takes part, and kept as its status."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from extproc.policy.inference_policy import KIND, InferencePolicy
from extproc.policy.merge import Path
from extproc.policy.model_tokens import ModelTokens, as_told
from extproc.reach.coverage import UNCOVERED, Coverage
from extproc.reach.hosts import LostClaim
from extproc.reach.intake import Held
from extproc.reach.outcomes import Outcome, written_path
from extproc.reach.status import (
    ACCEPTED,
    FALSE,
    INVALID,
    Condition,
    Findings,
    PolicyStatus,
    Standing,
    conditions_in,
    conditions_of,
    is_written,
)
from extproc.reach.warnings import warnings
from kvmesh.documents.documents import Document, DocumentProblem

FEW = 3
SHADOW_PATH = "spec.shadow"


@dataclass(slots=True)
class _Share:
    """One outcome's findings on one policy."""

    takes_part: bool = False
    holds: bool = False  # at least one field here has this policy's value
    lost: dict[Path, str] = field(default_factory=dict)  # field -> its winner
    conflicts: dict[str, set[Path]] = field(default_factory=lambda: defaultdict(set))
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    shadow_by: str = ""  # the policy that puts the pool into shadow mode


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claims:
    """A policy's claims of hosts."""

    lost: Sequence[LostClaim]
    rivals: Sequence[LostClaim]  # lost to this policy
    standings: Mapping[str, Standing]


@dataclass(slots=True)
class FindingsBook:
    """The last findings on each policy; the same object while nothing changes for it."""

    _found: dict[str, tuple[Any, Findings]] = field(default_factory=dict)  # policy -> their inputs, the findings
    _shares: dict[int, tuple[Outcome, dict[str, _Share]]] = field(default_factory=dict)  # by the outcome's id()

    def settle(
        self,
        policies: Mapping[str, Held[InferencePolicy]],
        coverages: Mapping[str, Coverage],
        outcomes: Mapping[str, Outcome],
        lost_hosts: Iterable[LostClaim],
        standings: Callable[[str], Mapping[str, Standing]],
    ) -> dict[str, Findings]:
        """Return the findings on each policy; `standings`: by policy and host."""
        distinct = {id(outcome): outcome for outcome in outcomes.values()}
        self._shares = {key: self._shares.get(key) or (each, _shares_of(each)) for key, each in distinct.items()}
        hosts: defaultdict[str, list[LostClaim]] = defaultdict(list)
        contested: defaultdict[str, list[LostClaim]] = defaultdict(list)  # by the winner
        for lost in lost_hosts:
            hosts[lost.claim.source].append(lost)
            contested[lost.winner].append(lost)
        before, self._found = self._found, {}
        for source, held in policies.items():
            coverage = coverages.get(source, UNCOVERED)
            covered = [outcomes[pool] for pool in coverage.pools]
            claims = _Claims(lost=hosts.get(source, []), rivals=contested.get(source, []), standings=standings(source))
            basis = (held.version, held.error, coverage, covered, claims)
            known = before.get(source)
            if known is None or known[0] != basis:
                found = _findings(held, coverage, claims, self._shares_for(source, coverage, covered))
                known = (basis, found)
            self._found[source] = known
        return {source: findings for source, (_, findings) in self._found.items()}

    def _shares_for(
        self, source: str, coverage: Coverage, outcomes: Iterable[Outcome]
    ) -> list[tuple[_Share, list[str]]]:
        pools: defaultdict[int, list[str]] = defaultdict(list)
        for pool, outcome in zip(coverage.pools, outcomes, strict=True):
            pools[id(outcome)].append(pool)
        found = [(self._shares[key][1].get(source), names) for key, names in pools.items()]
        return [(share, names) for share, names in found if share is not None]


def _shares_of(outcome: Outcome) -> dict[str, _Share]:
    shares: defaultdict[str, _Share] = defaultdict(_Share)
    for each in outcome.layers:
        shares[each.source].takes_part = True
    for source in outcome.merged.origins.values():
        shares[source].holds = True
    for loss in outcome.merged.losses:
        shares[loss.loser].lost[loss.path] = loss.winner
        if loss.is_conflict:
            shares[loss.loser].conflicts[loss.winner].add(loss.path)
    for fault in outcome.faults:
        shares[fault.source].faults.append(fault.message)
    if outcome.policy.shadow:
        for each in outcome.layers:
            shares[each.source].shadow_by = outcome.origins.get(SHADOW_PATH, "")
    for message in outcome.warnings:
        shares[_author(message, outcome)].warnings.append(message)
    return shares


def _author(warning: str, outcome: Outcome) -> str:
    """Return the source of the field that a warning begins with, or of a field below it; or the strongest policy."""
    path = warning.partition(": ")[0]
    for written, source in outcome.origins.items():
        if written == path or written.startswith((f"{path}.", f"{path}[")) or path.startswith(f"{written}["):
            return source
    return outcome.layers[-1].source if outcome.layers else ""


def _findings(
    held: Held[InferencePolicy],
    coverage: Coverage,
    claims: _Claims,
    shares: Sequence[tuple[_Share, list[str]]],
) -> Findings:
    conflicts: defaultdict[str, set[Path]] = defaultdict(set)
    for share, _ in shares:
        for winner, paths in share.conflicts.items():
            conflicts[winner] |= paths
    own = warnings(held.good) if held.good is not None and not held.error else []
    merged = [f"{message} (at {_some(pools)})" for message, pools in _pools_by_message(shares, "warnings")]
    said = [
        *own,
        *_host_warnings(claims),
        *(message for message in merged if not any(message.startswith(known) for known in own)),
    ]
    return Findings(
        invalid=_invalid(held, shares),
        missing_targets=coverage.missing,
        has_targets_left=coverage.has_target,
        conflicts={winner: sorted(written_path(path) for path in paths) for winner, paths in conflicts.items()},
        lost_hosts=_lost_hosts(claims),
        overridden=_overridden(shares, {path for paths in conflicts.values() for path in paths}),
        is_lost=any(share.takes_part for share, _ in shares) and not any(share.holds for share, _ in shares),
        emptiness=coverage.emptiness,
        warnings=tuple([*said, coverage.emptiness] if coverage.emptiness else said),
        hosts=claims.standings,
        shadow=_shadow(shares),
    )


def _shadow(shares: Sequence[tuple[_Share, list[str]]]) -> str:
    pools: defaultdict[str, list[str]] = defaultdict(list)
    for share, names in shares:
        if share.shadow_by:
            pools[share.shadow_by] += names
    return "; ".join(f"at {_some(names)} by {SHADOW_PATH} of {source}" for source, names in sorted(pools.items()))


def _overridden(shares: Sequence[tuple[_Share, list[str]]], conflicts: Container[Path]) -> dict[str, list[str]]:
    """Return the policy's fields that are in force nowhere, by the winners; conflicts are listed separately."""
    taking_part = [share for share, _ in shares if share.takes_part]
    winners: defaultdict[Path, list[str]] = defaultdict(list)
    for share in taking_part:
        for path, winner in share.lost.items():
            winners[path].append(winner)
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, names in winners.items():
        if len(names) == len(taking_part) and path not in conflicts:
            found[_some(set(names))].append(written_path(path))
    return {names: sorted(paths) for names, paths in found.items()}


def _lost_hosts(claims: _Claims) -> Mapping[str, Sequence[str]]:
    """Return winner -> hosts."""
    hosts: defaultdict[str, list[str]] = defaultdict(list)
    for lost in claims.lost:
        if lost.winner:
            hosts[lost.winner].append(f"spec.hosts[{lost.claim.host}]")
    return hosts


def _host_warnings(claims: _Claims) -> list[str]:
    """Return warnings about hosts without a pool, and about rivals."""
    unassigned: defaultdict[str, list[str]] = defaultdict(list)
    for lost in claims.lost:
        if not lost.winner:
            unassigned[lost.claim.host].append(lost.claim.pool)
    return [
        f"spec.hosts: {host} would lead to {_some(pools)}, so it leads to none; name one pool in targetRefs"
        for host, pools in unassigned.items()
    ] + [
        f"spec.hosts: {lost.claim.host} is claimed by {lost.claim.source}, too, and does not lead to its pool"
        for lost in claims.rivals
    ]


def _invalid(held: Held[InferencePolicy], shares: Sequence[tuple[_Share, list[str]]]) -> str:
    faults = [f"not in force at {_some(pools)}: {message}" for message, pools in _pools_by_message(shares, "faults")]
    own = [f"{held.error}; {held.instead}"] if held.error else []
    return "; ".join([*own, *faults])


def _pools_by_message(
    shares: Sequence[tuple[_Share, list[str]]], what: Literal["faults", "warnings"]
) -> Iterable[tuple[str, list[str]]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for share, pools in shares:
        for message in share.faults if what == "faults" else share.warnings:
            found[message] += pools
    return found.items()


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - FEW
    return ", ".join(ordered[:FEW]) + (f" and {more} more" if more > 0 else "")


# --- statuses ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A status, its inputs, and whether the document already has it."""

    findings: Findings
    tokens: tuple[tuple[str, ModelTokens], ...]
    document: Document
    status: PolicyStatus
    is_written: bool


@dataclass(slots=True)
class StatusBook:
    """The last status of each policy; it keeps the conditions' times until the document has them."""

    installation: str
    _kept: dict[str, _Kept] = field(default_factory=dict)

    def update(
        self,
        policies: Mapping[str, Held[InferencePolicy]],
        findings: Mapping[str, Findings],
        *,
        tokens: Mapping[str, tuple[tuple[str, ModelTokens], ...]],
        now: datetime,
    ) -> None:
        """Take the current findings on each policy; `tokens` are by policy, from `found_wrong` for its pools."""
        time = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        before, self._kept = self._kept, {}
        for source, held in policies.items():
            known = before.get(source)
            found, wrong = findings[source], tokens.get(source, ())
            is_new = known is None or known.findings is not found or known.document is not held.document
            is_told = known is not None and as_told(known.tokens) == as_told(wrong)
            if known is None or is_new or not is_told:
                known = self._keep(held, found, wrong, known.status if known else None, time)
            self._kept[source] = known

    def _keep(
        self,
        held: Held[InferencePolicy],
        findings: Findings,
        tokens: tuple[tuple[str, ModelTokens], ...],
        before: PolicyStatus | None,
        time: str,
    ) -> _Kept:
        namespace, _, name = held.source.partition("/")
        wanted = PolicyStatus(
            namespace=namespace,
            name=name,
            uid=held.uid,
            observed_generation=held.generation,
            conditions=conditions_of(findings, generation=held.generation, tokens=tokens),
            hosts=findings.hosts,
            installation=self.installation,
        )
        ours: tuple[Condition, ...] = before.conditions if before is not None and before.uid == held.uid else ()
        status = wanted.since(conditions_in(held.document, self.installation), ours, now=time)
        if before == status and before is not None:
            status = before
        written = is_written(status, held.document)
        return _Kept(
            findings=findings,
            tokens=tokens,
            document=held.document,
            status=status,
            is_written=written,
        )

    def statuses(self) -> dict[str, PolicyStatus]:
        """Return all statuses by policy, "namespace/name"."""
        return {source: kept.status for source, kept in self._kept.items()}

    def unwritten(self) -> tuple[PolicyStatus, ...]:
        """Return the statuses that differ from their document's."""
        return tuple(kept.status for kept in self._kept.values() if not kept.is_written)


def refusals(statuses: Iterable[PolicyStatus]) -> Iterator[DocumentProblem]:
    """Yield the policies that are not accepted as problems: a document in a folder has no status to read."""
    for status in statuses:
        for condition in status.conditions:
            if condition.type == ACCEPTED and condition.status == FALSE:
                reason = "policy-not-valid" if condition.reason == INVALID else "policy-target-not-found"
                yield DocumentProblem(reason=reason, where=f"{KIND} {status.source}", words=condition.message)

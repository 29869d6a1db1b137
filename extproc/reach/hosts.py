"""Which host leads to which pool: claims by policies and annotations, and the winner of each host. Pure.

A host never belongs to two pools: prompts for one would be routed by the other's policy.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from extproc.policy.merge import NO_AGE
from extproc.reach.coverage import Reach, pool_key
from extproc.reach.outcomes import Outcome
from kvmesh.documents.documents import DocumentProblem
from kvmesh.documents.pools import Pool

HOSTS_ANNOTATION = "kvmesh.io/hosts"  # on an InferencePool or a Service: host,host
HOSTS = ("hosts",)  # path in the merged fields
HOST = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClaim:
    """A policy (or a pool's annotation) claims that requests for this host go to this pool."""

    host: str  # lowercase, without port; "*.example.com" for all subdomains
    pool: str
    source: str  # "namespace/name" of the policy, or the pool's kind and name
    created_at: str | None  # RFC 3339; of the policy or the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class LostClaim:
    """A claim that is not in force, and the host's winner; "" if one policy claims the host for several pools."""

    claim: HostClaim
    winner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledHosts:
    """Each host with its one pool."""

    by_pool: Mapping[str, frozenset[str]]
    lost: tuple[LostClaim, ...]


def settle_hosts(claims: Iterable[HostClaim]) -> SettledHosts:
    """Give each host to the pool of the oldest claim; ties go to the first source by name.

    If the winner claims it for several pools, no pool gets it: no rule could tell which one the author meant.
    """
    by_host: defaultdict[str, list[HostClaim]] = defaultdict(list)
    for claim in claims:
        by_host[claim.host].append(claim)
    by_pool: defaultdict[str, set[str]] = defaultdict(set)
    lost: list[LostClaim] = []
    for host, rivals in sorted(by_host.items()):
        first = min(rivals, key=_age)
        pools = {claim.pool for claim in rivals if claim.source == first.source}
        if len(pools) == 1:
            by_pool[first.pool].add(host)
            winner = first.source
        else:
            winner = ""
        lost += [LostClaim(claim=claim, winner=winner) for claim in rivals if winner == "" or claim.pool != first.pool]
    return SettledHosts(by_pool={pool: frozenset(hosts) for pool, hosts in by_pool.items()}, lost=tuple(lost))


def read_hosts(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the annotation into valid hosts and invalid entries."""
    entries = [entry.strip().lower().partition(":")[0] for entry in text.split(",") if entry.strip()]
    hosts = [entry for entry in entries if len(entry) <= 253 and HOST.fullmatch(entry)]
    return tuple(dict.fromkeys(hosts)), tuple(entry for entry in entries if entry not in hosts)


def _age(claim: HostClaim) -> tuple[str, str, str]:
    return (claim.created_at or NO_AGE, claim.source, claim.pool)


def settle_pool_hosts(
    pools: Iterable[Pool], outcomes: Mapping[str, Outcome], reach: Reach
) -> tuple[SettledHosts, tuple[DocumentProblem, ...]]:
    """Return the hosts by pool, and the problems of annotations; the problems of policies go to their statuses."""
    claims: list[HostClaim] = []
    problems: list[DocumentProblem] = []
    annotated: dict[str, str] = {}
    for pool in pools:
        claims += _by_policy(pool.name, outcomes[pool.name])
        where = f"{pool.kind} {pool.name}"
        metadata = _mapping(reach.pool_documents.get(pool_key(pool), {}).get("metadata"))
        hosts, bad = read_hosts(str(_mapping(metadata.get("annotations")).get(HOSTS_ANNOTATION, "")))
        created_at = metadata.get("creationTimestamp")
        annotated[pool.name] = where
        claims += [
            HostClaim(host=host, pool=pool.name, source=where, created_at=str(created_at) if created_at else None)
            for host in hosts
        ]
        problems += [_problem("host-not-valid", where, f"{entry[:80]!r} is no host's name") for entry in bad]
    settled = settle_hosts(claims)
    for lost in settled.lost:
        if lost.claim.source == annotated[lost.claim.pool]:
            message = f"{lost.claim.host} is claimed by {lost.winner}, which is older"
            problems.append(_problem("host-claimed", lost.claim.source, message))
    return settled, tuple(problems)


def _by_policy(pool: str, outcome: Outcome) -> Iterator[HostClaim]:
    source = outcome.merged.origins.get(HOSTS)
    if source is None:
        return
    created_at = next(each.layer.created_at for each in outcome.layers if each.source == source)
    for host in outcome.merged.fields["hosts"]:
        yield HostClaim(host=host, pool=pool, source=source, created_at=created_at)


def _problem(reason: str, where: str, message: str) -> DocumentProblem:
    return DocumentProblem(reason=reason, where=where, words=f"metadata.annotations[{HOSTS_ANNOTATION}]: {message}")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

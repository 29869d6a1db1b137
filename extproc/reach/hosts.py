"""Which host leads to which pool: claims by policies and annotations, and the winner of each host. Pure.

A host never belongs to two pools: prompts for one would be routed by the other's policy. The first claim wins, not the
oldest object: else a host could be taken away by adding it to an old policy of another namespace.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from extproc.policy.inference_policy import KIND
from extproc.policy.merge import NO_AGE
from extproc.reach.coverage import Reach, pool_key
from extproc.reach.outcomes import Outcome
from extproc.reach.status import Standing
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
    standing: Standing = Standing.NEW


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
    """Give each host to the claim in force, else to a new one, the oldest object's first; ties go to the first name.

    If the winner claims it for several pools, no pool gets it: no rule could tell which one the author meant.
    """
    by_host: defaultdict[str, list[HostClaim]] = defaultdict(list)
    for claim in claims:
        by_host[claim.host].append(claim)
    by_pool: defaultdict[str, set[str]] = defaultdict(set)
    lost: list[LostClaim] = []
    for host, rivals in sorted(by_host.items()):
        first = min(rivals, key=_rank)
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


def _rank(claim: HostClaim) -> tuple[int, str, str, str]:
    return (claim.standing, claim.created_at or NO_AGE, claim.source, claim.pool)


class HostBook:
    """The standing of each claim. Those in the policies' statuses come first: all replicas read them, and restarts."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Standing]] = {}  # as decided last, by source and host

    def settle(
        self,
        pools: Iterable[Pool],
        outcomes: Mapping[str, Outcome],
        reach: Reach,
        written: Mapping[str, Mapping[str, Standing]],
    ) -> tuple[SettledHosts, tuple[DocumentProblem, ...]]:
        """Return the hosts by pool, and the problems of claims; both sides of policies also have them in their status.

        `written` are the standings in the statuses, by policy and host.
        """
        claims: list[HostClaim] = []
        problems: list[DocumentProblem] = []
        for pool in pools:
            claims += _by_policy(pool.name, outcomes[pool.name])
            where = f"{pool.kind} {pool.name}"
            metadata = _mapping(reach.pool_documents.get(pool_key(pool), {}).get("metadata"))
            hosts, bad = read_hosts(str(_mapping(metadata.get("annotations")).get(HOSTS_ANNOTATION, "")))
            created_at = metadata.get("creationTimestamp")
            claims += [
                HostClaim(host=host, pool=pool.name, source=where, created_at=str(created_at) if created_at else None)
                for host in hosts
            ]
            problems += [_problem("host-not-valid", where, f"{entry[:80]!r} is no host's name") for entry in bad]
        settled = settle_hosts(replace(each, standing=self._standing(each, written)) for each in claims)
        self._known = {}
        for claim in claims:
            self._known.setdefault(claim.source, {})[claim.host] = Standing.IN_FORCE
        for each in settled.lost:
            self._known[each.claim.source][each.claim.host] = Standing.LOST
        problems += [
            _problem("host-claimed", each.claim.source, f"{each.claim.host} belongs to {each.winner}, the first claim")
            for each in settled.lost
            if each.winner
        ]
        return settled, tuple(problems)

    def agrees(self, written: Mapping[str, Mapping[str, Standing]]) -> bool:
        """Tell whether the statuses have the same standings; the leader may have met two claims in another order."""
        return all(
            written.get(source, {}).get(host, standing) is standing
            for source, standings in self._known.items()
            for host, standing in standings.items()
        )

    def standings(self, source: str) -> Mapping[str, Standing]:
        """Return the standings of a policy's claims, by host."""
        return self._known.get(source, {})

    def _standing(self, claim: HostClaim, written: Mapping[str, Mapping[str, Standing]]) -> Standing:
        for standings in (written, self._known):
            if (standing := standings.get(claim.source, {}).get(claim.host)) is not None:
                return standing
        return Standing.NEW


def _by_policy(pool: str, outcome: Outcome) -> Iterator[HostClaim]:
    source = outcome.merged.origins.get(HOSTS)
    if source is None:
        return
    created_at = next(each.layer.created_at for each in outcome.layers if each.source == source)
    for host in outcome.merged.fields["hosts"]:
        yield HostClaim(host=host, pool=pool, source=source, created_at=created_at)


def _problem(reason: str, source: str, message: str) -> DocumentProblem:
    if " " in source:  # a pool with its kind
        return DocumentProblem(
            reason=reason, where=source, words=f"metadata.annotations[{HOSTS_ANNOTATION}]: {message}"
        )
    return DocumentProblem(reason=reason, where=f"{KIND} {source}", words=f"spec.hosts: {message}")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

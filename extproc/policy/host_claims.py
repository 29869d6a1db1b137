"""Whose a host is that several pools claim: requests that name no pool are told apart by it. Pure.

Called by `mesh_policy`. A host is never served by two pools: prompts of one would be routed by the other's policy.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from extproc.policy.merge import NO_AGE

HOSTS_ANNOTATION = "kvmesh.io/hosts"  # on an InferencePool or a Service: host,host
HOST = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClaim:
    """A policy (or a pool's annotation) says that requests for this host go to this pool."""

    host: str  # lowercase, without port; "*.example.com" for all below
    pool: str
    source: str  # "namespace/name" of the policy, or the pool's own name
    created_at: str | None  # RFC 3339, of the policy or the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class LostClaim:
    """A claim that is not in force, and whose host it is; "" where one policy claims it for several pools."""

    claim: HostClaim
    winner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledHosts:
    """Each host with its one pool."""

    by_pool: Mapping[str, frozenset[str]]
    lost: tuple[LostClaim, ...]


def settle_hosts(claims: Iterable[HostClaim]) -> SettledHosts:
    """Give each host to the pool of the oldest claim, then of the first by name.

    Where this is one policy for several pools, nobody gets it: no rule would tell which pool its author meant.
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
    """Split the annotation into hosts and what are none."""
    entries = [entry.strip().lower().partition(":")[0] for entry in text.split(",") if entry.strip()]
    hosts = [entry for entry in entries if len(entry) <= 253 and HOST.fullmatch(entry)]
    return tuple(dict.fromkeys(hosts)), tuple(entry for entry in entries if entry not in hosts)


def _age(claim: HostClaim) -> tuple[str, str, str]:
    return (claim.created_at or NO_AGE, claim.source, claim.pool)

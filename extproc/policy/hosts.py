"""Which hosts lead to which pool: what policies and annotations claim, settled. Called by `mesh_policy`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from extproc.policy.host_claims import HOSTS_ANNOTATION, HostClaim, SettledHosts, read_hosts, settle_hosts
from extproc.policy.outcomes import Outcome
from extproc.policy.reach import Reach, pool_key
from kvmesh.documents.documents import DocumentProblem
from kvmesh.documents.pools import Pool

HOSTS = ("hosts",)  # the path in a merged document


def settle_pool_hosts(
    pools: Iterable[Pool], outcomes: Mapping[str, Outcome], reach: Reach
) -> tuple[SettledHosts, tuple[DocumentProblem, ...]]:
    """Return who has which host, and what is wrong with annotations; policies learn of it by their status."""
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
            words = f"{lost.claim.host} is claimed by {lost.winner}, which is older"
            problems.append(_problem("host-claimed", lost.claim.source, words))
    return settled, tuple(problems)


def _by_policy(pool: str, outcome: Outcome) -> Iterator[HostClaim]:
    source = outcome.merged.origins.get(HOSTS)
    if source is None:
        return
    created_at = next(each.layer.created_at for each in outcome.layers if each.layer.source == source)
    for host in outcome.merged.fields["hosts"]:
        yield HostClaim(host=host, pool=pool, source=source, created_at=created_at)


def _problem(reason: str, where: str, words: str) -> DocumentProblem:
    return DocumentProblem(reason=reason, where=where, words=f"metadata.annotations[{HOSTS_ANNOTATION}]: {words}")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

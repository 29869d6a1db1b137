"""Judges pools that come from documents: what is wrong with the documents, who is in each pool, who serves them."""

from collections.abc import Iterator

from extproc.doctor.facts import Facts, PoolFacts
from extproc.doctor.findings import Finding, Severity, error, warning
from extproc.policy.status import ACCEPTED, CONFLICTED, FALSE, TRUE, WARNING

NAMED = 4  # addresses or pools that one finding names


def pool_documents(facts: Facts) -> Iterator[Finding]:
    """No document is refused."""
    for problem in facts.mesh.problems if facts.mesh else ():
        yield error(
            problem.where,
            f"{problem.words} ({problem.reason})",
            fix="correct the document; docs/discovery.md has a line for each of these reasons",
        )


def pool_policies(facts: Facts) -> Iterator[Finding]:
    """Every policy is in force as it is written."""
    for status in facts.mesh.policies if facts.mesh else ():
        for condition in status.conditions:
            words = f"{condition.message} ({condition.reason})"
            if condition.type == ACCEPTED and condition.status == FALSE:
                yield error(f"InferencePolicy {status.source}", words, fix="correct the field that is named")
            elif condition.type in (CONFLICTED, WARNING) and condition.status == TRUE:
                fix = f"see what is in force: `kvmesh policy explain InferencePolicy/{status.source}`"
                yield warning(f"InferencePolicy {status.source}", words, fix=fix)


def pool_endpoints(facts: Facts) -> Iterator[Finding]:
    """Every pool has endpoints that may get requests, of its own, and a model; those where all is well say so."""
    if facts.mesh is None:
        return
    if not facts.mesh.pools:
        yield error(
            "pools",
            "no document names a pool",
            fix='create an InferencePool, or give a Service the label kvmesh.io/pool: "true"',
        )
    shared = _shared(facts.mesh.pools)
    for pool in facts.mesh.pools:
        wrong = list(_wrong(pool))
        if pool.name in shared:
            others, address = shared[pool.name]
            seen = f"shares {address} with {', '.join(others[:NAMED])}: the pod's blocks are indexed for one pool alone"
            wrong.append(error(pool.name, seen, fix="put each pod into one pool: let no two selectors match it"))
        yield from wrong or [Finding(check="", severity=Severity.OK, subject=pool.name, seen=_summary(pool))]


def pool_picker(facts: Facts) -> Iterator[Finding]:
    """The running picker serves the pools of the documents, with as many endpoints."""
    mesh, picker = facts.mesh, facts.picker
    if mesh is None or mesh.served is None or picker is None:
        return
    fix = "see its log and `kvmesh policy explain --url`: it reads other documents (--namespaces, --policies), or late"
    expected = {pool.name: len(pool.endpoints) for pool in mesh.pools}
    if missing := sorted(expected.keys() - mesh.served.keys()):
        yield error(picker.url, f"does not serve {_names(missing)}", fix=fix)
    if further := sorted(mesh.served.keys() - expected.keys()):
        yield error(picker.url, f"also serves {_names(further)}", fix=fix)
    for name in sorted(expected.keys() & mesh.served.keys()):
        if expected[name] != mesh.served[name]:
            seen = f"has {mesh.served[name]} endpoints of {name}, the documents {expected[name]}"
            yield warning(picker.url, seen, fix="ask again: pods that come and go just now look like this; else " + fix)


def _wrong(pool: PoolFacts) -> Iterator[Finding]:
    usable = [each for each in pool.endpoints if each.ready and not each.terminating]
    if not pool.endpoints:
        yield error(pool.name, "has no pods", fix="compare the pool's selector with the labels of its pods")
    elif not usable:
        seen = f"none of its {len(pool.endpoints)} endpoints is ready: its requests are answered 503"
        yield error(pool.name, seen, fix="see why: kubectl describe pod")
    elif away := [each.pod or each.address for each in pool.endpoints if not each.ready and not each.terminating]:
        seen = f"{len(usable)} of {len(pool.endpoints)} endpoints are ready; not {_names(away)}"
        yield warning(pool.name, seen, fix="see why: kubectl describe pod")
    if usable and pool.model is None:
        yield error(
            pool.name,
            "nobody says which model it serves: nothing of it is indexed",
            fix="set the annotation kvmesh.io/model on the pool, or let its pods answer /v1/models",
        )


def _summary(pool: PoolFacts) -> str:
    usable = sum(each.ready and not each.terminating for each in pool.endpoints)
    policies = f"policies {', '.join(pool.policies)}" if pool.policies else "no policy"
    return (
        f"{usable} of {len(pool.endpoints)} endpoints ready; blocks under {pool.hash_seed!r}, model {pool.model!r}; "
        f"{policies}"
    )


def _shared(pools: tuple[PoolFacts, ...]) -> dict[str, tuple[list[str], str]]:
    """Return for each pool that has an address of others: these, and the first such address."""
    owners: dict[str, list[str]] = {}
    for pool in pools:
        for endpoint in pool.endpoints:
            owners.setdefault(endpoint.address, []).append(pool.name)
    found: dict[str, tuple[list[str], str]] = {}
    for address, names in owners.items():
        for name in names if len(names) > 1 else ():
            found.setdefault(name, ([other for other in names if other != name], address))
    return found


def _names(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")

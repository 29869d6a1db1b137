"""All checks by name, each with the message for success. Pure: facts in, findings out."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from extproc.pages.findings import Finding, Severity, error, unchecked, warning
from extproc.reach.status import ACCEPTED, FALSE, PENDING, PROGRAMMED, WARNING, Condition
from operate.doctor import judge_clusters as clusters
from operate.doctor import judge_envoy as envoy
from operate.doctor import judge_index as index
from operate.doctor import judge_pods as pods
from operate.doctor.facts import Facts, PoolFacts
from operate.doctor.judge_pods import NAMED, first_names

Judge = Callable[[Facts], Iterable[Finding]]


def pool_documents(facts: Facts) -> Iterator[Finding]:
    """No document is refused."""
    for problem in facts.mesh.problems if facts.mesh else ():
        yield error(
            problem.where,
            f"{problem.words} ({problem.reason})",
            fix="correct the document; docs/guides/discovery.md has a line for each of these reasons",
        )


def pool_policies(facts: Facts) -> Iterator[Finding]:
    """Every policy is in force as written."""
    for status in facts.mesh.policies if facts.mesh else ():
        where = f"InferencePolicy {status.source}"
        fix = f"see what is in force: `kvmesh policy explain InferencePolicy/{status.source}`"
        by_type = {condition.type: condition for condition in status.conditions}
        accepted, programmed, warned = (by_type.get(each) for each in (ACCEPTED, PROGRAMMED, WARNING))
        if accepted is not None and accepted.status == FALSE:
            yield error(where, _words(accepted), fix="correct the field that is named")
        elif programmed is not None and programmed.reason not in (PROGRAMMED, PENDING):
            yield warning(where, _words(programmed), fix=fix)
        if warned is not None:  # includes policies that cover no pool
            yield warning(where, _words(warned), fix=fix)


def _words(condition: Condition) -> str:
    return f"{condition.message} ({condition.reason})"


def pool_endpoints(facts: Facts) -> Iterator[Finding]:
    """Every pool has ready endpoints that no other pool has, and a model; pools in order get an ok finding."""
    if facts.mesh is None:
        return
    if not facts.mesh.pools:
        yield error(
            "pools",
            "no document names a pool",
            fix='create an InferencePool, or give a Service the label kvmesh.io/pool: "true"',
        )
    shared = _shared_addresses(facts.mesh.pools)
    for pool in facts.mesh.pools:
        wrong = list(_wrong_with_pool(pool))
        if pool.name in shared:
            others, address = shared[pool.name]
            seen = f"shares {address} with {', '.join(others[:NAMED])}: the pod's blocks are indexed for one pool alone"
            wrong.append(error(pool.name, seen, fix="put each pod into one pool: let no two selectors match it"))
        yield from wrong or [Finding(check="", severity=Severity.OK, subject=pool.name, seen=_pool_summary(pool))]


def pool_picker(facts: Facts) -> Iterator[Finding]:
    """The running picker serves the documents' pools with the same number of endpoints."""
    mesh, picker = facts.mesh, facts.picker
    if mesh is None or mesh.served is None or picker is None:
        return
    fix = (
        "see its log and `kvmesh policy explain --picker`: it reads other documents (--namespaces, --policies), or late"
    )
    expected = {pool.name: len(pool.endpoints) for pool in mesh.pools}
    if missing := sorted(expected.keys() - mesh.served.keys()):
        yield error(picker.url, f"does not serve {first_names(missing)}", fix=fix)
    if further := sorted(mesh.served.keys() - expected.keys()):
        yield error(picker.url, f"also serves {first_names(further)}", fix=fix)
    for name in sorted(expected.keys() & mesh.served.keys()):
        if expected[name] != mesh.served[name]:
            seen = f"has {mesh.served[name]} endpoints of {name}, the documents {expected[name]}"
            yield warning(picker.url, seen, fix="ask again: pods that come and go just now look like this; else " + fix)


def _wrong_with_pool(pool: PoolFacts) -> Iterator[Finding]:
    usable = [each for each in pool.endpoints if each.ready and not each.terminating]
    if not pool.endpoints:
        yield error(pool.name, "has no pods", fix="compare the pool's selector with the labels of its pods")
    elif not usable:
        seen = f"none of its {len(pool.endpoints)} endpoints is ready: its requests are answered 503"
        yield error(pool.name, seen, fix="see why: kubectl describe pod")
    elif away := [each.pod or each.address for each in pool.endpoints if not each.ready and not each.terminating]:
        seen = f"{len(usable)} of {len(pool.endpoints)} endpoints are ready; not {first_names(away)}"
        yield warning(pool.name, seen, fix="see why: kubectl describe pod")
    if usable and pool.model is None:
        yield error(
            pool.name,
            "nobody says which model it serves: nothing of it is indexed",
            fix="set the annotation kvmesh.io/model on the pool, or let its pods answer /v1/models",
        )


def _pool_summary(pool: PoolFacts) -> str:
    usable = sum(each.ready and not each.terminating for each in pool.endpoints)
    policies = f"policies {', '.join(pool.policies)}" if pool.policies else "no policy"
    return (
        f"{usable} of {len(pool.endpoints)} endpoints ready; blocks under {pool.hash_seed!r}, model {pool.model!r}; "
        f"{policies}"
    )


def _shared_addresses(pools: tuple[PoolFacts, ...]) -> dict[str, tuple[list[str], str]]:
    """Return, for each pool that shares an address, the other pools and the first shared address."""
    owners: dict[str, list[str]] = {}
    for pool in pools:
        for endpoint in pool.endpoints:
            owners.setdefault(endpoint.address, []).append(pool.name)
    found: dict[str, tuple[list[str], str]] = {}
    for address, names in owners.items():
        for name in names if len(names) > 1 else ():
            found.setdefault(name, ([other for other in names if other != name], address))
    return found


def _pods(facts: Facts) -> bool:
    return bool(facts.answering)


def _vllms(facts: Facts) -> bool:
    return bool(facts.vllms)


def _redis(facts: Facts) -> bool:
    return not facts.redis.problem


def _index(facts: Facts) -> bool:
    return not facts.index.problem and bool(facts.answering)


def _envoy_filter(facts: Facts) -> bool:
    return facts.envoy is not None and facts.envoy.picking_filter() is not None


def _envoy_steering(facts: Facts) -> bool:
    return _envoy_filter(facts) and (not facts.expected.pool or clusters.leads_to_pool(facts))


def _envoy_failure_mode(facts: Facts) -> bool:
    return _envoy_filter(facts) and bool(facts.expected.failure_mode) and clusters.leads_to_pool(facts)


def _mesh(facts: Facts) -> bool:
    return facts.mesh is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check."""

    judge: Judge
    right: str  # message of the ok finding
    applies: Callable[[Facts], bool] = lambda _: True  # whether the facts for it were gathered


CHECKS: dict[str, Check] = {
    "pods-answer": Check(judge=pods.pods_answer, right="every pod answers as an inference engine"),
    "pod-key": Check(judge=pods.pods_let_in, right="the pods let picker and indexer see their pages", applies=_pods),
    "models-served": Check(judge=pods.models_served, right="the pods serve the configured models", applies=_pods),
    "vllm-version": Check(judge=pods.vllm_version, right="the pods run one known version of vLLM", applies=_vllms),
    "prefix-caching": Check(judge=pods.prefix_caching, right="every pod caches prefixes", applies=_vllms),
    "kv-fetches": Check(
        judge=pods.kv_fetches,
        right="the blocks of prefill pods arrive in time",
        applies=lambda facts: any(pod.fetch_seconds is not None for pod in facts.vllms),
    ),
    "render": Check(
        judge=pods.render,
        right="the pods tell the tokens of prompts",
        applies=lambda facts: any(pod.render_status for pod in facts.pods),
    ),
    "event-publisher": Check(judge=index.event_publisher, right="every pod publishes its KV events", applies=_pods),
    "replay-socket": Check(judge=index.replay_socket, right="every pod can replay its events", applies=_pods),
    "index-follows": Check(judge=index.index_follows, right="an indexer follows every pod", applies=_index),
    "events-flow": Check(judge=index.events_flow, right="events come of what the pods compute", applies=_index),
    "block-size": Check(
        judge=index.block_size, right="pods, events and index have the same block size", applies=_index
    ),
    "same-keys": Check(
        judge=index.same_keys,
        right="a fresh prompt is found in the index where it went",
        applies=lambda facts: bool(facts.trials),
    ),
    "indexer-findings": Check(
        judge=index.indexer_findings,
        right="the indexers have found nothing wrong",
        applies=lambda facts: facts.indexer is not None,
    ),
    "clocks": Check(
        judge=pods.clocks,
        right="the clocks agree",
        applies=lambda facts: not facts.redis.problem or any(pod.clock_ahead_seconds is not None for pod in facts.pods),
    ),
    "redis-answers": Check(judge=index.redis_answers, right="Redis answers and is new enough"),
    "redis-memory": Check(judge=index.redis_memory, right="Redis evicts nothing and has room", applies=_redis),
    "redis-persistence": Check(judge=index.redis_persistence, right="Redis writes no append-only file", applies=_redis),
    "redis-latency": Check(judge=index.redis_latency, right="Redis answers in time", applies=_redis),
    "picker-answers": Check(
        judge=pods.picker_answers,
        right="the picker is ready and serves gRPC",
        applies=lambda facts: facts.picker is not None,
    ),
    "picker-endpoints": Check(
        judge=pods.picker_endpoints,
        right="the picker has the same endpoints",
        applies=lambda facts: facts.picker is not None and not facts.picker.problem,
    ),
    "picker-tokens": Check(
        judge=pods.picker_tokens,
        right="the running picker makes the pods' tokens",
        applies=lambda facts: (
            facts.picker is not None and bool(facts.picker.token_states or facts.picker.token_sources)
        ),
    ),
    "envoy-filter": Check(
        judge=envoy.envoy_filter,
        right="Envoy shows requests to an ext_proc service",
        applies=lambda facts: facts.envoy is not None,
    ),
    "envoy-updates": Check(
        judge=envoy.envoy_updates,
        right="Envoy has taken the configuration that it was given",
        applies=lambda facts: facts.envoy is not None and not facts.envoy.problem,
    ),
    "envoy-routes": Check(judge=envoy.envoy_routes, right="the filter is on", applies=_envoy_filter),
    "envoy-mode": Check(judge=envoy.envoy_mode, right="the filter's modes are right", applies=_envoy_filter),
    "envoy-retries": Check(
        judge=envoy.envoy_retries,
        right="no retry reaches a pod after another has begun",
        applies=lambda facts: _envoy_filter(facts) and facts.picker is not None and facts.picker.prefill_pods > 0,
    ),
    "envoy-timeouts": Check(judge=envoy.envoy_timeouts, right="no timeout cuts a generation", applies=_envoy_filter),
    "envoy-header": Check(judge=envoy.envoy_header, right="clients cannot choose their pod", applies=_envoy_filter),
    "envoy-steering": Check(
        judge=clusters.envoy_steering, right="Envoy goes where the picker says", applies=_envoy_steering
    ),
    "envoy-failure-mode": Check(
        judge=clusters.envoy_failure_mode,
        right="without a picker, Envoy does what the policy says",
        applies=_envoy_failure_mode,
    ),
    "envoy-picker": Check(judge=clusters.envoy_picker, right="Envoy reaches the picker", applies=_envoy_filter),
    "pool-documents": Check(judge=pool_documents, right="every document is taken as it is", applies=_mesh),
    "pool-policies": Check(judge=pool_policies, right="every policy is in force as it is written", applies=_mesh),
    "pool-endpoints": Check(judge=pool_endpoints, right="every pool has pods of its own", applies=_mesh),
    "pool-picker": Check(
        judge=pool_picker,
        right="the picker serves these pools",
        applies=lambda facts: facts.mesh is not None and facts.mesh.served is not None,
    ),
}
# with several pools, made for each pool with its own pods, models and index keys; the other checks are made once
OF_EACH_POOL = frozenset(CHECKS) & {
    *("pods-answer", "pod-key", "models-served", "vllm-version", "prefix-caching"),
    *("kv-fetches", "render"),
    *("event-publisher", "replay-socket", "index-follows", "events-flow", "block-size", "same-keys"),
    *("picker-tokens", "envoy-steering", "envoy-failure-mode"),
}
OF_THE_MESH = frozenset(CHECKS) - OF_EACH_POOL - {"picker-endpoints"}  # which `pool-picker` compares


def judge(facts: Facts, *, names: Collection[str] = CHECKS) -> tuple[Finding, ...]:
    """Return the findings of all applicable checks in order; a check without findings yields one ok finding.

    `names` selects the checks.
    """
    findings: list[Finding] = []
    for name, check in ((name, check) for name, check in CHECKS.items() if name in names):
        found = _found(check, facts)
        findings += [msgspec.structs.replace(finding, check=name) for finding in found]
        if not found and check.applies(facts):
            findings.append(Finding(check=name, severity=Severity.OK, subject="", seen=check.right))
    return tuple(findings)


def _found(check: Check, facts: Facts) -> list[Finding]:
    """Run one check. If another program's unexpected answer breaks it, the other checks still run."""
    try:
        return list(check.judge(facts))
    except (TypeError, ValueError, KeyError, AttributeError) as defect:
        return [unchecked("doctor", f"cannot read what was answered: {defect!r}", fix="report this as a bug")]

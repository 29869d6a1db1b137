"""All checks by name, and what is said where one finds nothing. Pure: facts in, findings out."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import msgspec

from extproc.doctor import judge_envoy as envoy
from extproc.doctor import judge_index as index
from extproc.doctor import judge_pods as pods
from extproc.doctor import judge_tokens as tokens
from extproc.doctor import judge_xds as xds
from extproc.doctor.facts import Facts
from extproc.doctor.findings import Finding, Severity, unchecked

Judge = Callable[[Facts], Iterable[Finding]]


def _always(_: Facts) -> bool:
    return True


def _pods(facts: Facts) -> bool:
    return bool(facts.answering)


def _redis(facts: Facts) -> bool:
    return not facts.redis.problem


def _index(facts: Facts) -> bool:
    return not facts.index.problem and bool(facts.answering)


def _tokenized(facts: Facts) -> bool:
    return any(pod.tokens for pod in facts.pods)


def _tried(facts: Facts) -> bool:
    return bool(facts.trials)


def _rendered(facts: Facts) -> bool:
    return any(pod.render_status for pod in facts.pods)


def _picker(facts: Facts) -> bool:
    return facts.picker is not None


def _picker_answers(facts: Facts) -> bool:
    return facts.picker is not None and not facts.picker.problem


def _clocks(facts: Facts) -> bool:
    return not facts.redis.problem or any(pod.clock_ahead_seconds is not None for pod in facts.pods)


def _picker_tokens(facts: Facts) -> bool:
    return facts.picker is not None and bool(facts.picker.tokens)


def _indexer(facts: Facts) -> bool:
    return facts.indexer is not None


def _envoy(facts: Facts) -> bool:
    return facts.envoy is not None


def _envoy_answers(facts: Facts) -> bool:
    return facts.envoy is not None and not facts.envoy.problem


def _envoy_filter(facts: Facts) -> bool:
    return facts.envoy is not None and facts.envoy.picking_filter() is not None


def _envoy_retries(facts: Facts) -> bool:
    return _envoy_filter(facts) and facts.picker is not None and facts.picker.prefill_pods > 0


def _envoy_steering(facts: Facts) -> bool:
    return _envoy_filter(facts) and (not facts.expected.pool or envoy.leads_to_pool(facts))


def _envoy_failure_mode(facts: Facts) -> bool:
    return _envoy_filter(facts) and bool(facts.expected.failure_mode) and envoy.leads_to_pool(facts)


def _mesh(facts: Facts) -> bool:
    return facts.mesh is not None


def _served_pools(facts: Facts) -> bool:
    return facts.mesh is not None and facts.mesh.served is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that is looked at."""

    judge: Judge
    right: str  # what is said where nothing is wrong
    applies: Callable[[Facts], bool] = _always  # whether there is anything to judge, and so to say


CHECKS: dict[str, Check] = {
    "pods-answer": Check(judge=pods.pods_answer, right="every pod answers as a vLLM"),
    "pod-key": Check(judge=pods.pods_let_in, right="the pods let picker and indexer see their pages", applies=_pods),
    "models-served": Check(judge=pods.models_served, right="the pods serve the configured models", applies=_pods),
    "vllm-version": Check(judge=pods.vllm_version, right="the pods run one known version of vLLM", applies=_pods),
    "prefix-caching": Check(judge=pods.prefix_caching, right="every pod caches prefixes", applies=_pods),
    "tokens": Check(
        judge=tokens.tokens, right="picker and pods make the same tokens of every probe", applies=_tokenized
    ),
    "render": Check(judge=pods.render, right="the pods tell the tokens of prompts", applies=_rendered),
    "event-publisher": Check(judge=index.event_publisher, right="every pod publishes its KV events", applies=_pods),
    "replay-socket": Check(judge=index.replay_socket, right="every pod can replay its events", applies=_pods),
    "index-follows": Check(judge=index.index_follows, right="an indexer follows every pod", applies=_index),
    "events-flow": Check(judge=index.events_flow, right="events come of what the pods compute", applies=_index),
    "block-size": Check(
        judge=index.block_size, right="pods, events and index have the same block size", applies=_index
    ),
    "same-keys": Check(
        judge=index.same_keys, right="a fresh prompt is found in the index where it went", applies=_tried
    ),
    "indexer-findings": Check(
        judge=index.indexer_findings, right="the indexers have found nothing wrong", applies=_indexer
    ),
    "clocks": Check(judge=pods.clocks, right="the clocks agree", applies=_clocks),
    "redis-answers": Check(judge=index.redis_answers, right="Redis answers and is new enough"),
    "redis-memory": Check(judge=index.redis_memory, right="Redis evicts nothing and has room", applies=_redis),
    "redis-persistence": Check(judge=index.redis_persistence, right="Redis writes no append-only file", applies=_redis),
    "redis-latency": Check(judge=index.redis_latency, right="Redis answers in time", applies=_redis),
    "picker-answers": Check(judge=pods.picker_answers, right="the picker is ready and serves gRPC", applies=_picker),
    "picker-endpoints": Check(
        judge=pods.picker_endpoints, right="the picker has the same endpoints", applies=_picker_answers
    ),
    "picker-tokens": Check(
        judge=tokens.picker_tokens, right="the running picker counts tokens as the pods do", applies=_picker_tokens
    ),
    "envoy-filter": Check(
        judge=envoy.envoy_filter, right="Envoy shows requests to an ext_proc service", applies=_envoy
    ),
    "envoy-updates": Check(
        judge=xds.envoy_updates, right="Envoy has taken the configuration that it was given", applies=_envoy_answers
    ),
    "envoy-routes": Check(judge=xds.envoy_routes, right="the filter is on", applies=_envoy_filter),
    "envoy-mode": Check(judge=envoy.envoy_mode, right="the filter's modes are right", applies=_envoy_filter),
    "envoy-retries": Check(
        judge=envoy.envoy_retries, right="no retry reaches a pod after another has begun", applies=_envoy_retries
    ),
    "envoy-timeouts": Check(judge=envoy.envoy_timeouts, right="no timeout cuts a generation", applies=_envoy_filter),
    "envoy-header": Check(judge=envoy.envoy_header, right="clients cannot choose their pod", applies=_envoy_filter),
    "envoy-steering": Check(
        judge=envoy.envoy_steering, right="Envoy goes where the picker says", applies=_envoy_steering
    ),
    "envoy-failure-mode": Check(
        judge=envoy.envoy_failure_mode,
        right="without a picker, Envoy does what the policy says",
        applies=_envoy_failure_mode,
    ),
    "envoy-picker": Check(judge=envoy.envoy_picker, right="Envoy reaches the picker", applies=_envoy_filter),
    "pool-documents": Check(judge=pods.pool_documents, right="every document is taken as it is", applies=_mesh),
    "pool-policies": Check(judge=pods.pool_policies, right="every policy is in force as it is written", applies=_mesh),
    "pool-endpoints": Check(judge=pods.pool_endpoints, right="every pool has pods of its own", applies=_mesh),
    "pool-picker": Check(judge=pods.pool_picker, right="the picker serves these pools", applies=_served_pools),
}
# of several pools these are asked of each with its own pods, models and part of the index; the others once
OF_EACH_POOL = frozenset(CHECKS) & {
    *("pods-answer", "pod-key", "models-served", "vllm-version", "prefix-caching", "tokens", "render"),
    *("event-publisher", "replay-socket", "index-follows", "events-flow", "block-size", "same-keys"),
    *("picker-tokens", "envoy-steering", "envoy-failure-mode"),
}
OF_THE_MESH = frozenset(CHECKS) - OF_EACH_POOL - {"picker-endpoints"}  # `pool-picker` compares those


def judge(facts: Facts, *, names: Collection[str] = CHECKS) -> tuple[Finding, ...]:
    """Return the findings of all checks that apply, in their order; one that finds nothing says so in one line.

    `names` are the checks that are made.
    """
    findings: list[Finding] = []
    for name, check in ((name, check) for name, check in CHECKS.items() if name in names):
        found = _found(check, facts)
        findings += [msgspec.structs.replace(finding, check=name) for finding in found]
        if not found and check.applies(facts):
            findings.append(Finding(check=name, severity=Severity.OK, subject="", seen=check.right))
    return tuple(findings)


def _found(check: Check, facts: Facts) -> list[Finding]:
    """Run one check. What another program's answer makes of our reading of it must not hide the other checks."""
    try:
        return list(check.judge(facts))
    except (TypeError, ValueError, KeyError, AttributeError) as defect:
        return [unchecked("doctor", f"cannot read what was answered: {defect!r}", fix="report this as a bug")]

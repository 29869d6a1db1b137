"""Warnings for the status: valid settings that are probably not intended (shed everything, match nothing, do nothing).

`warnings` checks a single document, `merged_warnings` the merged policy. Each warning begins with its field's path.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from extproc.models.models import ModelTable
from extproc.policy.autoscale import MOST_WAITED_SECONDS, ROLES, SERVING_ROLES
from extproc.policy.disaggregation import OffloadRule
from extproc.policy.inference_policy import InferencePolicy
from extproc.policy.priority import ANY, DEFAULT_CLASSES, StepKind
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy

LIMITS = ("requestsPerMinute", "promptTokensPerMinute", "generatedTokensPerMinute", "concurrentRequests")
QUICKEST_SECONDS = 0.01  # no engine has its first token sooner, network included
LEAST_CEILING = 0.05


def warnings(policy: InferencePolicy) -> list[str]:
    """Return the warnings about one document, independent of all others."""
    spec = policy.fields
    if not spec:
        return ["spec: sets nothing"]
    priorities: Mapping[str, Any] = spec.get("priorities", {})
    return [
        *_of_sections(spec),
        *_of_classes(priorities.get("classes", {})),
        *_of_rules(priorities.get("rules", ())),
        *_of_quotas(spec.get("quotas", ())),
        *_of_models(spec.get("models", {})),
        *_of_failure_mode(spec.get("failureMode")),
    ]


def merged_warnings(policy: PickPolicy, models: ModelTable) -> list[str]:
    """Return the warnings about a pool's merged policy."""
    found = []
    priorities = policy.priorities
    reached = _reached_classes(priorities)
    for name, priority_class in priorities.classes.items():
        where = f"spec.priorities.classes[{name}]"
        if name not in reached and priority_class.reserved_share > 0:
            found.append(f"{where}.reservedShare: reserved for no request: no rule, objective or default leads here")
        elif name not in reached and name not in DEFAULT_CLASSES:
            found.append(f"{where}: no request can get it: no rule, objective or default leads here")
    found += _of_limits(policy)
    found += _of_first_pods(policy)
    if models.only_listed:
        if not models.names() and models.rule_for(ANY) is None:
            found.append("spec.models.onlyListed: no model is listed, every request that names one is answered 404")
        for i, quota in enumerate(priorities.quotas):
            if quota.model != ANY and quota.model not in models.names():
                found.append(f"spec.quotas[{i}].model: matches nothing: {quota.model!r} is not listed (onlyListed)")
        for i, rule in enumerate(priorities.rules):
            if rule.models and not models.names().intersection(rule.models):
                found.append(f"spec.priorities.rules[{i}].models: match nothing: none is listed (onlyListed)")
    return found


def _of_limits(policy: PickPolicy) -> Iterator[str]:
    """Check limits that must be reached in a certain order."""
    prefill, offload = policy.autoscale.prefill, policy.disaggregation
    wanted_from = None if prefill is None else prefill.scale_up.queue_requests
    if wanted_from is not None and offload.enabled and offload.rule == OffloadRule.THRESHOLDS:
        sent_until = offload.prefill_queue_requests
        if wanted_from >= sent_until:
            yield (
                f"spec.autoscale.prefill.scaleUp.queueRequests: {wanted_from:g} is never reached: from "
                f"disaggregation's prefillQueueRequests ({sent_until:g}) on no more prompts go there"
            )


def _of_first_pods(policy: PickPolicy) -> Iterator[str]:
    for role, scaled in policy.autoscale.by_role.items():
        where, seconds = f"spec.autoscale.{role}.waitFromZeroSeconds", scaled.wait_from_zero_seconds
        if seconds is None:
            continue
        if role not in SERVING_ROLES:
            yield f"{where}: says nothing: no request waits for the first pod that computes prompts for others"
        elif scaled.min_replicas:
            yield f"{where}: says nothing: minReplicas is {scaled.min_replicas}, so that the pool is never without pods"
        elif seconds > MOST_WAITED_SECONDS:
            yield (
                f"{where}: {seconds:g} s are more than gateways wait by default: install with --longest-queue-seconds "
                "of as much, or they may end the wait"
            )


def _of_sections(spec: Mapping[str, Any]) -> Iterator[str]:
    usage = spec.get("load", {}).get("overload", {}).get("kvUsage", 1)
    if usage < LEAST_CEILING:
        yield f"spec.load.overload.kvUsage: pods count as full from {usage:g} of their cache on: nearly always"
    autoscale = spec.get("autoscale")
    if autoscale and not any(role in autoscale for role in ROLES):
        yield "spec.autoscale: names no role here: it acts only where another policy says so"
    offload = spec.get("disaggregation", {})
    if offload.get("rule") == OffloadRule.VOTES and not offload.get("votes"):
        yield "spec.disaggregation.votes: are none, so that the rule leaves every prompt where it is decoded"
    if offload and not offload.get("enabled"):
        yield "spec.disaggregation.enabled: is not true here: the section acts only where another policy says so"


def _of_classes(classes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, given in classes.items():
        where = f"spec.priorities.classes[{name}]"
        for i, step in enumerate(given.get("degrade", ())):
            if step["step"] == StepKind.REJECT and step["enter"] < 1:
                yield f"{where}.degrade[{i}].enter: refuses from {step['enter']:g} of the target on, which is still met"
        if given.get("sheddable", True) and given.get("ttftSeconds", 1) < QUICKEST_SECONDS:
            yield f"{where}.ttftSeconds: no pod answers within {given['ttftSeconds']:g} s: sheds everything"
        if given.get("ceiling", 1) < LEAST_CEILING:
            yield f"{where}.ceiling: at {given['ceiling']:g} of their limits hardly a pod ever has room"
        if given.get("queueRequests") == 0 and given.get("sheddable"):
            yield f"{where}.queueRequests: none may wait: everything is shed while no pod has room"


def _of_rules(rules: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for i, rule in enumerate(rules):
        for j, earlier in enumerate(rules[:i]):
            if _covers(earlier, rule):
                yield f"spec.priorities.rules[{i}]: matches nothing: rules[{j}] comes first and matches all of it"
                break


def _covers(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    """Tell whether every request that matches the later rule has matched the earlier one."""
    if earlier.get("models") and not (later.get("models") and set(later["models"]) <= set(earlier["models"])):
        return False
    if not later.get("pathPrefix", "").startswith(earlier.get("pathPrefix", "")):
        return False
    return all(
        name in later.get(part, {}) and value in (ANY, later[part][name])
        for part in ("headers", "claims")
        for name, value in earlier.get(part, {}).items()
    )


def _of_quotas(quotas: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for i, quota in enumerate(quotas):
        closed = [limit for limit in LIMITS if quota.get(limit) == 0]
        if closed:
            whom = "every request" if quota["tenant"] == quota["model"] == ANY else "every request that it is for"
            yield f"spec.quotas[{i}]: a limit of 0 refuses {whom}"


def _of_models(models: Mapping[str, Any]) -> Iterator[str]:
    for i, rule in enumerate(models.get("rules", ())):
        for j, target in enumerate(rule["targets"]):
            if target["weight"] == 0:
                yield f"spec.models.rules[{i}].targets[{j}].weight: 0 sends it nothing"


def _of_failure_mode(mode: str | None) -> Iterator[str]:
    if mode == "FailOpen":
        yield (
            "spec.failureMode: FailOpen is the running picker's; while none answers, Envoy does what "
            "`kvmesh install --failure-mode` says (`kvmesh doctor` compares the two)"
        )


def _reached_classes(priorities: PriorityPolicy) -> frozenset[str]:
    """By rule, objective or default, or named by a request, if that lowers its priority or is trusted."""
    led_to = {priorities.default_class, *(rule.priority_class for rule in priorities.rules)}
    trusted = priorities.trust_objective or any(rule.trust_objective for rule in priorities.rules)
    named = (*priorities.classes, *priorities.objectives.values())
    own = [priorities.classes[name] for name in led_to if name in priorities.classes]
    for name in named:
        asked = priorities.classes.get(name)
        if asked is not None and (
            trusted or any(asked.priority <= one.priority and (one.sheddable <= asked.sheddable) for one in own)
        ):
            led_to.add(name)
    return frozenset(led_to)

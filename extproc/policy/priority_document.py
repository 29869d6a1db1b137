"""Checks of the part `priorities` of the policy that concern several fields; each error names the path.

Called by `policy_document`, which has read the fields. Header names leave in lower case, as Envoy sends them.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from extproc.errors import ConfigError
from extproc.policy.document_fields import nearest
from extproc.policy.priority import ClassRule, DegradationStep, PriorityClass, PriorityPolicy, Quota, StepKind

# it stands in response headers and labels
CLASS_NAME = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
REFUSAL_STATUSES = (429, 503)
# what the picker reads for purposes of its own
OWN_HEADERS: Mapping[str, str] = {
    "x-gateway-inference-objective": "use `objectives`",
    ":path": "use `path_prefix`",
    ":method": "it tells nothing of a class",
    "x-request-id": "it is each request's own",
    "traceparent": "it is each request's own",
}
HEADER_NAME = re.compile(r":?[-!#$%&'*+.^_`|~0-9a-z]+")  # RFC 9110, 5.6.2; Envoy's own begin with a colon
ROUNDING = 1e-9
ANY = "*"


def checked_priorities(policy: PriorityPolicy, *, path: str) -> PriorityPolicy:
    """Return the policy with header names in lower case and ceilings that fall with priority.

    Raise ConfigError with the path of what contradicts.
    """
    for name, priority_class in policy.classes.items():
        _check_class(name, priority_class, f"{path}.classes.{name}")
    reserved = sum(priority_class.reserved_share for priority_class in policy.classes.values())
    if reserved > 1 + ROUNDING:
        raise ConfigError(f"{path}.classes: the reserved shares add up to {reserved:g}, and there is only 1 to share")
    _require_class(policy.default_class, policy, f"{path}.default_class")
    for objective, name in policy.objectives.items():
        _require_class(name, policy, f"{path}.objectives.{objective}")
    rules = tuple(_checked_rule(rule, policy, f"{path}.rules[{i}]") for i, rule in enumerate(policy.rules))
    _check_quotas(policy.quotas, f"{path}.quotas")
    overload = policy.overload
    if overload.least_retry_seconds > overload.most_retry_seconds:
        raise ConfigError(f"{path}.overload.least_retry_seconds: must not be above most_retry_seconds")
    header = policy.tenant_header
    if header is not None:
        header = _header(header, f"{path}.tenant_header")
    return replace(policy, classes=_with_falling_ceilings(policy.classes), rules=rules, tenant_header=header)


def _with_falling_ceilings(classes: Mapping[str, PriorityClass]) -> Mapping[str, PriorityClass]:
    """Return the classes, none with a higher ceiling than one above it: it would overtake that one, and for ever."""
    ordered = sorted(classes.items(), key=lambda item: -item[1].priority)
    lowest = {
        priority: min(item.ceiling for _, item in ordered if item.priority >= priority)
        for priority in {item.priority for _, item in ordered}
    }
    return {
        name: item if item.ceiling <= lowest[item.priority] else replace(item, ceiling=lowest[item.priority])
        for name, item in classes.items()
    }


def _check_class(name: str, priority_class: PriorityClass, path: str) -> None:
    if CLASS_NAME.fullmatch(name) is None:
        raise ConfigError(f"{path}: a class's name has up to 63 letters, digits, '-', '_' and '.', not {name!r}")
    if priority_class.refusal_status not in REFUSAL_STATUSES:
        raise ConfigError(f"{path}.refusal_status: must be 429 or 503, not {priority_class.refusal_status}")
    for i, step in enumerate(priority_class.degrade):
        _check_step(step, priority_class, f"{path}.degrade[{i}]")


def _check_step(step: DegradationStep, priority_class: PriorityClass, path: str) -> None:
    if step.leave >= step.enter:
        raise ConfigError(f"{path}.leave: must be below enter ({step.enter:g}), not {step.leave:g}")
    needs_tokens = step.step in (StepKind.CAP_OUTPUT, StepKind.LIMIT_PROMPT)
    if needs_tokens != (step.tokens > 0):
        raise ConfigError(f"{path}.tokens: {step.step} {'needs a number above 0' if needs_tokens else 'has no tokens'}")
    needs_model = step.step is StepKind.SMALLER_MODEL
    if needs_model != bool(step.model):
        raise ConfigError(f"{path}.model: {step.step} {'needs a model' if needs_model else 'has no model'}")
    if step.step is StepKind.REJECT and not priority_class.sheddable:
        raise ConfigError(f"{path}.step: only sheddable classes may be refused (sheddable: true)")


def _require_class(name: str, policy: PriorityPolicy, path: str) -> None:
    if name not in policy.classes:
        raise ConfigError(f"{path}: there is no class {name!r}{nearest(name, policy.classes)}")


def _checked_rule(rule: ClassRule, policy: PriorityPolicy, path: str) -> ClassRule:
    _require_class(rule.priority_class, policy, f"{path}.priority_class")
    if not (rule.headers or rule.path_prefix or rule.models or rule.claims):
        raise ConfigError(f"{path}: matches every request; give a condition, or set default_class")
    if rule.path_prefix and (not rule.path_prefix.startswith("/") or "?" in rule.path_prefix):
        raise ConfigError(f"{path}.path_prefix: must start with '/' and have no '?', not {rule.path_prefix!r}")
    if ANY in rule.models:
        raise ConfigError(f"{path}.models: names models; leave it out for all of them, {ANY!r} is none")
    headers = {_header(name, f"{path}.headers.{name}"): value for name, value in rule.headers.items()}
    if "" in headers or "" in rule.claims:
        raise ConfigError(f"{path}: a header or claim without name")
    return replace(rule, headers=headers)


def _header(name: str, path: str) -> str:
    lower = name.strip().lower()
    if lower in OWN_HEADERS:
        raise ConfigError(f"{path}: {lower!r} cannot be used here: {OWN_HEADERS[lower]}")
    if lower and HEADER_NAME.fullmatch(lower) is None:
        raise ConfigError(f"{path}: {name!r} is no header's name")
    return lower


def _check_quotas(quotas: tuple[Quota, ...], path: str) -> None:
    for i, quota in enumerate(quotas):
        limits = (
            *(quota.requests_per_minute, quota.prompt_tokens_per_minute),
            *(quota.generated_tokens_per_minute, quota.concurrent_requests),
        )
        if all(limit is None for limit in limits):
            raise ConfigError(f"{path}[{i}]: limits nothing; give requests_per_minute or another limit")
        for j, earlier in enumerate(quotas[:i]):
            if earlier.tenant in (ANY, quota.tenant) and earlier.model in (ANY, quota.model):
                raise ConfigError(f"{path}[{i}]: never counts: {path}[{j}] comes first and matches all that it matches")

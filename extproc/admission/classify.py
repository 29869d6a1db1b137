"""A request's class (by rules, by the objective that it names, or by default) and its tenant.

`pick` calls `classify` once per request; `service` asks at start which headers and claims it reads. Never an error: an
unknown class and an objective that the request may not claim are ignored.
"""

from collections.abc import Mapping, Sequence

from extproc.ext_proc.answers import CLAIM_SEPARATOR
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.models import ModelTable, ResolvedModel
from extproc.policy.priority import FAIRNESS_HEADER, ClassRule, PriorityClass, Quota
from extproc.policy.request_class import IgnoredObjective, PriorityPolicy, RequestClass

ANY = "*"
MOST_TENANT_CHARACTERS = 256
UNDECLARED = PriorityClass()


def classify(facts: RequestFacts, *, model: str | None, policy: PriorityPolicy) -> RequestClass:
    """Return class and tenant of a request for `model` (see `asked_model`).

    The first matching rule sets the class, or else the default applies. The objective that the request names may then
    lower it, or also raise it if the policy trusts the header.
    """
    classes = policy.classes
    class_name, why, trusted = policy.default_class, "default", policy.trust_objective
    for number, rule in enumerate(policy.rules, 1):
        if _matches(rule, facts, model):
            class_name, why = rule.priority_class, f"rule {number}"
            if rule.trust_objective is not None:
                trusted = rule.trust_objective
            break
    priority_class = classes.get(class_name, UNDECLARED)
    ignored = IgnoredObjective.NO
    if facts.objective:
        named = policy.objectives.get(facts.objective, facts.objective)
        asked = classes.get(named)
        if asked is None:
            ignored = IgnoredObjective.UNKNOWN
        elif trusted or not _is_promotion(priority_class, asked):
            class_name, priority_class, why = named, asked, "objective"
        else:
            ignored = IgnoredObjective.UNTRUSTED
    return RequestClass(
        class_name=class_name,
        priority_class=priority_class,
        tenant=tenant_of(facts, policy),
        why=why,
        ignored_objective=ignored,
    )


def policy_needs_bodies(policy: PriorityPolicy, table: ModelTable) -> bool:
    """Tell whether the policy depends on the bodies' contents: then unreadable bodies must not pass."""
    decides = bool(
        policy.quotas
        or any(rule.models for rule in policy.rules)
        or any(found.degrade for found in policy.classes.values())
    )
    return bool(policy.engine_priority or table.rules or (decides and not policy.shadow))


def asked_model(name: str | None, table: ModelTable) -> str | None:
    """Return the requested model. A request that names none gets the pods' own, known only if one model is served."""
    return table.served[0].name if name is None and len(table.served) == 1 else name


def charged_model(quotas: Sequence[Quota], *, tenant: str, resolved: ResolvedModel) -> str | None:
    """Return the model name that quotas count a request under.

    It is the serving model's, so that all aliases of a model fill one bucket: the adapter's name, or else its base's
    first served name. The name in the request counts only if the first matching quota is for that name.
    """
    base, requested = resolved.base, resolved.requested
    served = resolved.adapter or (base.name if base is not None else resolved.model)
    if requested is None or requested == served:
        return served
    for quota in quotas:
        if quota.tenant in (ANY, tenant) and quota.model in (ANY, served, requested):
            return requested if quota.model == requested else served
    return served


def headers_named(policy: PriorityPolicy) -> frozenset[str]:
    """Return the request headers (lowercase) that `classify` reads besides the objective's."""
    named = {name for rule in policy.rules for name in rule.headers}
    return frozenset(named | ({header} if (header := header_of_tenant(policy)) else set()))


def claims_named(policy: PriorityPolicy) -> frozenset[str]:
    """Return the claims that `classify` reads; "a.b" is b within a."""
    named = {name for rule in policy.rules for name in rule.claims}
    return frozenset(named | ({policy.tenant_claim} if policy.tenant_claim else set()))


def _is_promotion(own: PriorityClass, asked: PriorityClass) -> bool:
    return asked.priority > own.priority or (own.sheddable and not asked.sheddable)


def _matches(rule: ClassRule, facts: RequestFacts, model: str | None) -> bool:
    if rule.models and model not in rule.models:
        return False
    # a prefix has no "?", so the query string never matches
    if rule.path_prefix and not facts.path.startswith(rule.path_prefix):
        return False
    if rule.headers and not _headers(facts.headers, rule.headers):
        return False
    return not rule.claims or _claims(facts.claims, rule.claims)


def _headers(found: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    for name, value in wanted.items():
        own = found.get(name)
        if own is None or value not in (ANY, own):
            return False
    return True


def _claims(found: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    for name, value in wanted.items():
        own = found.get(name)
        if own is None or (value not in (ANY, own) and not _is_among(value, own)):
            return False
    return True


def _is_among(value: str, entries: str) -> bool:
    # the substring test is cheap, and fails for most rules: only then split
    return value in entries and value in entries.split(CLAIM_SEPARATOR)


def tenant_of(facts: RequestFacts, policy: PriorityPolicy) -> str:
    """Return the tenant that the request is charged to, or "" if it names none."""
    if policy.tenant_claim:
        claimed = facts.claims.get(policy.tenant_claim)
        if claimed and CLAIM_SEPARATOR not in claimed:  # a claim with several values names no tenant
            return claimed[:MOST_TENANT_CHARACTERS]
    return facts.headers.get(header_of_tenant(policy), "")[:MOST_TENANT_CHARACTERS]


def header_of_tenant(policy: PriorityPolicy) -> str:
    """Return the header that names the tenant if no claim does, or "".

    If a claim names the tenant, a client must not become another tenant by leaving the token out: then a header counts
    only if the policy names it.
    """
    if policy.tenant_header is not None:
        return policy.tenant_header
    return "" if policy.tenant_claim else FAIRNESS_HEADER

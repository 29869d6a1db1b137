"""Which class a request belongs to, and whose it is: rules, the objective that it names, or the default.

`pick` calls `classify` once a request, `service` asks at start-up what it must be told of a request. Never an
error: what the policy does not know, and what a request may not claim, counts for nothing.
"""

from collections.abc import Mapping, Sequence

from extproc.ext_proc.answers import CLAIM_SEPARATOR
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.model_rules import ResolvedModel
from extproc.models.models import ModelTable
from extproc.policy.priority import ClassRule, PriorityClass, PriorityPolicy, Quota
from extproc.policy.request_class import IgnoredObjective, RequestClass

ANY = "*"
MOST_TENANT_CHARACTERS = 256
UNDECLARED = PriorityClass()


def classify(facts: RequestFacts, *, model: str | None, policy: PriorityPolicy) -> RequestClass:
    """Return class and tenant of a request for `model`: as the client writes it, or the pods' where it names none.

    The first rule that matches sets the class, else it is the default. The objective that the request names may then
    lower it; raise it, too, where the policy trusts the header.
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
    """Tell whether what is in a body decides what a request may have: then none may pass that cannot be read."""
    decides = bool(
        policy.quotas
        or any(rule.models for rule in policy.rules)
        or any(found.degrade for found in policy.classes.values())
    )
    return bool(policy.engine_priority or table.rules or (decides and not policy.shadow))


def asked_model(name: str | None, table: ModelTable) -> str | None:
    """Return the model that a request asks for: without a name it gets the pods' own, known where there is only one."""
    return table.served[0].name if name is None and len(table.served) == 1 else name


def charged_model(quotas: Sequence[Quota], *, tenant: str, resolved: ResolvedModel) -> str | None:
    """Return the name under which a request counts for quotas.

    It is the one that serves it, so that all names of a model fill one bucket: an adapter's, else its base's first
    served name. Only where the first quota that matches is for the name in the request, that name counts.
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
    return frozenset(named | ({header} if (header := policy.header_of_tenant) else set()))


def claims_named(policy: PriorityPolicy) -> frozenset[str]:
    """Return the claims that `classify` reads; "a.b" is b within a."""
    named = {name for rule in policy.rules for name in rule.claims}
    return frozenset(named | ({policy.tenant_claim} if policy.tenant_claim else set()))


def _is_promotion(own: PriorityClass, asked: PriorityClass) -> bool:
    """Tell whether a request gains: it goes before others, or can no longer be refused."""
    return asked.priority > own.priority or (own.sheddable and not asked.sheddable)


def _matches(rule: ClassRule, facts: RequestFacts, model: str | None) -> bool:
    if rule.models and model not in rule.models:
        return False
    # a prefix has no "?", so that the query string takes no part
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
    # most rules are about another value: nothing is split for them
    return value in entries and value in entries.split(CLAIM_SEPARATOR)


def tenant_of(facts: RequestFacts, policy: PriorityPolicy) -> str:
    """Return who the request is charged to; "" for all who do not say."""
    if policy.tenant_claim:
        claimed = facts.claims.get(policy.tenant_claim)
        if claimed and CLAIM_SEPARATOR not in claimed:  # of several, none is the tenant
            return claimed[:MOST_TENANT_CHARACTERS]
    return facts.headers.get(policy.header_of_tenant, "")[:MOST_TENANT_CHARACTERS]

"""A request's class and tenant by the policy, and the policy's part that decides them. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from extproc.policy.priority import (
    DEFAULT_CLASSES,
    PRIORITIES,
    ClassRule,
    OverloadPolicy,
    PriorityClass,
    Quota,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityPolicy:
    """The classes, tenants, quotas and overload behaviour that a picker applies.

    Built from the sections of a policy by `policy.merged_policy`; the sections document each field.
    """

    classes: Mapping[str, PriorityClass] = field(default_factory=lambda: DEFAULT_CLASSES)
    default_class: str = PRIORITIES.default_class
    rules: tuple[ClassRule, ...] = ()
    objectives: Mapping[str, str] = field(default_factory=dict)  # InferenceObjective -> class
    trust_objective: bool = PRIORITIES.trust_objective
    tenant_header: str | None = PRIORITIES.tenants.header  # lowercase; "" disables it; None: `admission.classify`
    tenant_claim: str = PRIORITIES.tenants.claim
    quotas: tuple[Quota, ...] = ()
    engine_priority: bool = PRIORITIES.engine_priority
    overload: OverloadPolicy = field(default_factory=OverloadPolicy)
    shadow: bool = False  # decisions by load and quotas are only counted and shown

    @property
    def holds_back(self) -> bool:
        """Whether requests wait for room, and are refused without room in time."""
        return self.overload.enabled and not self.shadow


class IgnoredObjective(StrEnum):
    """Why the request's objective was ignored."""

    NO = ""  # it counts, or the request names none
    UNKNOWN = "unknown"  # neither an objective of the policy nor a class
    UNTRUSTED = "untrusted"  # it would promote the request, and the policy does not trust the header


class RequestClass(msgspec.Struct, frozen=True, kw_only=True):
    """The class and tenant of one request; made by `admission.classify`."""

    class_name: str
    priority_class: PriorityClass
    tenant: str = ""  # "" without a tenant
    why: str = "default"  # rule N, objective, default: for people
    ignored_objective: IgnoredObjective = IgnoredObjective.NO

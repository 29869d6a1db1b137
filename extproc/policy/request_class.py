"""What a request is under the policy: its class, its tenant, and what was done about it. Values only."""

from enum import StrEnum

import msgspec

from extproc.policy.priority import PriorityClass


class IgnoredObjective(StrEnum):
    """Why the objective that a request names counts for nothing."""

    NO = ""  # it counts, or none is named
    UNKNOWN = "unknown"  # neither an objective of the policy nor a class
    UNTRUSTED = "untrusted"  # it would promote the request, and the policy does not trust the header


class RequestClass(msgspec.Struct, frozen=True, kw_only=True):
    """Made once a request by `admission.classify`."""

    class_name: str
    priority_class: PriorityClass
    tenant: str = ""  # "": none is named
    why: str = "default"  # rule N, objective, default: for people
    ignored_objective: IgnoredObjective = IgnoredObjective.NO

"""Decisions on a request that shadow mode withholds: values."""

from enum import StrEnum

import msgspec


class ShadowRule(StrEnum):
    """The part of the policy that decided."""

    ADMISSION = "admission"  # by load: room at endpoints, targets of classes
    QUOTA = "quota"
    DEGRADATION = "degradation"
    DISAGGREGATION = "disaggregation"
    AUTOSCALE = "autoscale"


class ShadowAction(StrEnum):
    """The withheld effect on the request."""

    REFUSE = "refuse"
    WAIT = "wait"
    DEGRADE = "degrade"
    OFFLOAD = "offload"


class Withheld(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that was made but not applied."""

    rule: ShadowRule
    action: ShadowAction
    reason: str  # from a closed set: a refusal's reason, a quota's limit, a degradation step, a disaggregation rule
    words: str = ""  # for people

    @property
    def code(self) -> str:
        """The decision as a short code, for logs."""
        return f"{self.action.value}:{self.reason}"

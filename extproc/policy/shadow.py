"""What a policy in shadow would have done to a request and has not: values."""

from enum import StrEnum

import msgspec


class ShadowRule(StrEnum):
    """Whose decision it is."""

    ADMISSION = "admission"  # of the load: room at endpoints, targets of classes
    QUOTA = "quota"
    DEGRADATION = "degradation"
    DISAGGREGATION = "disaggregation"
    AUTOSCALE = "autoscale"


class ShadowAction(StrEnum):
    """What would have become of the request."""

    REFUSE = "refuse"
    WAIT = "wait"
    DEGRADE = "degrade"
    OFFLOAD = "offload"


class Withheld(msgspec.Struct, frozen=True, kw_only=True):
    """One decision that was made, and not carried out."""

    rule: ShadowRule
    action: ShadowAction
    reason: str  # of a closed set: as of a refusal, a quota's limit, a step, a rule of disaggregation
    words: str = ""  # for people

    @property
    def code(self) -> str:
        """The decision in short, for logs."""
        return f"{self.action.value}:{self.reason}"

"""What the operator wants to be shown of the traffic, and what is never to be shown. Values only.

Part of `policy.values`; read from `policy.observability` of a file or from `spec.observability` of an InferencePolicy.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityPolicy:
    """What is written down and shown; `sample_share` is older and stands beside the policy (`policy.pool_config`)."""

    audit_share: float = 1.0  # 0..1 of the decisions that are written to the access log and the audit
    show_prompt_text: bool = False  # True: the beginning of hot prompts may be shown on the page; else nowhere
    gpu_hour_price: float = 0.0  # of one endpoint's accelerators for an hour, in `currency`; 0: no money is shown
    currency: str = "USD"  # 1 to 8 letters, as it is shown

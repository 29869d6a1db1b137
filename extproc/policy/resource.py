"""What one InferencePolicy says by itself. Values; `policy.inference_policy` makes them, `policy_merge` merges."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRef:
    """What a policy applies to, in its own namespace."""

    group: str
    kind: str  # InferencePool, Service, Gateway or HTTPRoute
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePolicy:
    """One resource.

    `fields` is nested and partial: `policy` (as `parse_policy` reads it), `models` (as `parse_models`), `failure_mode`,
    `sample_share`, `hosts`. In merging, a mapping is merged key by key and everything else is one value; see
    `policy.inference_policy.RESETS`.
    """

    namespace: str
    name: str
    created_at: str  # RFC 3339 in UTC, compares as text; "" unknown
    generation: int  # 0 unknown
    target_refs: tuple[TargetRef, ...]
    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

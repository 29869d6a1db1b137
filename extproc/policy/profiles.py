"""Profiles: named bases of a policy for a workload, below all given fields. Pure.

Weights and ceilings stay at their defaults: no measurement calls for others.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from extproc.policy.merge import Layer, Level, precedence
from extproc.policy.targets import NamedTargets


class Profile(StrEnum):
    """The workload of a pool."""

    CONVERSATION = "conversation"  # chats: short answers, many users
    ANALYSIS = "analysis"  # long prompts, such as documents
    STREAMING = "streaming"  # long streamed answers
    BATCH = "batch"  # offline work


PROFILES: Mapping[Profile, Mapping[str, Any]] = MappingProxyType(
    {
        Profile.CONVERSATION: {
            "scoring": {"sessionSeconds": 1800.0},  # users think between turns
            "priorities": {"classes": {"standard": {"targets": NamedTargets.LLAMA2_70B_INTERACTIVE.value}}},
        },
        Profile.ANALYSIS: {
            "priorities": {
                "classes": {"standard": {"tolerance": "minutes", "targets": NamedTargets.LLAMA3_405B.value}}
            },
            "disaggregation": {"enabled": True},
        },
        Profile.STREAMING: {
            # as mlperf-llama2-70b-interactive, but also a limit of pods
            "priorities": {"classes": {"standard": {"interTokenSeconds": 0.04}}},
            "disaggregation": {"enabled": True},
        },
        Profile.BATCH: {
            "priorities": {"defaultClass": "sheddable", "classes": {"sheddable": {"tolerance": "hours"}}},
        },
    }
)
"""The fields of a `spec` by profile, as `inference_policy.read_spec` returns them."""


def with_profile(layers: Sequence[Layer]) -> Sequence[Layer]:
    """Add the profile named by the strongest of these layers, if any, as the weakest layer."""
    naming = [layer for layer in layers if "profile" in layer.fields]
    if not naming:
        return layers
    profile = Profile(min(naming, key=precedence).fields["profile"])
    fields = PROFILES[profile]
    return (*layers, Layer(source=f"profile {profile}", level=Level.PROFILE, created_at=None, fields=fields))

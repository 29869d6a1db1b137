"""Variants of one role's pods in a policy: GPU types, tensor-parallel sizes, and their prices."""

from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta

from extproc.policy.disaggregation import LabelName, LabelValue
from extproc.policy.schema import Amount, Rule, Seconds, Section, about, at_most, matching

PodPrice = Annotated[float, Meta(gt=0, le=10**6)]
VariantName = Annotated[
    str, matching(r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$", "letters, digits, and - . _ between them", most=63)
]
OTHERS = ""  # pods outside all variants


class ScaleVariant(Section, frozen=True, kw_only=True):
    """One variant of a role's pods."""

    conditions = (
        at_most("minReplicas", "maxReplicas"),
        Rule(
            cel="size(self.selector) > 0",
            message="selector needs a label at least: every pod would be of this variant",
            holds=lambda given: bool(given.get("selector")),
            at="selector",
        ),
    )

    name: Annotated[VariantName, about("name in metrics, `/state` and scalers")]
    selector: Annotated[
        Mapping[LabelName, LabelValue],
        Meta(max_length=16),
        about("labels of its pods; the first matching variant counts", entry=("name", "value")),
    ]
    pod_hour_price: Annotated[PodPrice, about("hourly price of its pod, in `observability.currency`")]
    min_replicas: Annotated[int, Meta(ge=0, le=10_000), about("minimum of pods")] = 0
    max_replicas: Annotated[Annotated[int, Meta(ge=1, le=10_000)] | None, about("maximum of pods")] = None
    start_seconds: Annotated[Seconds | None, about("start time of its new pod", default="the role's")] = None
    prefill_tokens_per_second: Annotated[Amount | None, about("prefill speed of its pod until observed")] = None
    decode_tokens_per_second: Annotated[
        Amount | None, about("decode speed of its pod at the inter-token target until observed")
    ] = None


def variant_of(labels: Mapping[str, str], variants: Iterable[ScaleVariant]) -> str:
    """Return the name of the first variant whose selector matches these labels, or OTHERS."""
    return next((each.name for each in variants if each.selector.items() <= labels.items()), OTHERS)

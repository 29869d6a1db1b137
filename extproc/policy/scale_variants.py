"""What a policy says of the kinds of pods of one role: GPU types, tensor-parallel sizes; what each costs."""

from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta

from extproc.policy.disaggregation import LabelName, LabelValue
from extproc.policy.schema import Amount, Rule, Seconds, Section, about, at_most, matching

PodPrice = Annotated[float, Meta(gt=0, le=10**6)]
DeploymentName = Annotated[str, matching(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "the name of a Deployment", most=63)]
VariantName = Annotated[
    str, matching(r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$", "letters, digits, and - . _ between them", most=63)
]
OTHERS = ""  # pods that are of no variant


class ScaleVariant(Section, frozen=True, kw_only=True):
    """One kind of pods of a role."""

    conditions = (
        at_most("minReplicas", "maxReplicas"),
        Rule(
            cel="size(self.selector) > 0",
            message="selector needs a label at least: every pod would be of this variant",
            holds=lambda given: bool(given.get("selector")),
            at="selector",
        ),
    )

    name: Annotated[VariantName, about("what it is called in metrics, in `/state` and by scalers")]
    selector: Annotated[
        Mapping[LabelName, LabelValue],
        Meta(max_length=16),
        about("labels of its pods; a pod is of the first variant whose labels it has", entry=("name", "value")),
    ]
    pod_hour_price: Annotated[PodPrice, about("what one of its pods costs an hour")]
    min_replicas: Annotated[int, Meta(ge=0, le=10_000), about("never fewer pods of it")] = 0
    max_replicas: Annotated[Annotated[int, Meta(ge=1, le=10_000)] | None, about("never more of it")] = None
    start_seconds: Annotated[Seconds | None, about("what a new pod of it takes", default="the role's")] = None
    deployment: Annotated[DeploymentName | None, about("of the pool's namespace, which `act` scales")] = None
    prefill_tokens_per_second: Annotated[
        Amount | None, about("prompt tokens that a pod of it computes; counts until one of its pods has shown it")
    ] = None
    decode_tokens_per_second: Annotated[
        Amount | None, about("tokens that it generates at the promised inter-token time; counts until seen, likewise")
    ] = None


def variant_of(labels: Mapping[str, str], variants: Iterable[ScaleVariant]) -> str:
    """Return the name of the first variant that a pod with these labels is of; OTHERS: of none."""
    return next((each.name for each in variants if each.selector.items() <= labels.items()), OTHERS)

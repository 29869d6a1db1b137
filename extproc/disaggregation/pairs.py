"""Which prefill pods go with a decode pod, and how fast the link between the two is: by the labels of both. Pure."""

from collections.abc import Mapping, Sequence

from extproc.pods.endpoint import Candidate
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.disaggregation import Disaggregation

Labels = Mapping[str, Mapping[str, str]]  # endpoint -> the labels of its pod that pairs are made by
NO_LABELS: Mapping[str, str] = {}


def partners(
    decode: str, prefillers: Sequence[Candidate], labels: Labels, policy: Disaggregation
) -> Sequence[Candidate]:
    """Return the prefill pods that have what the policy's `sameLabels` name as the decode pod has it, or lacks it."""
    if not policy.same_labels:
        return prefillers
    own = labels.get(decode, NO_LABELS)
    wanted = [(name, own.get(name)) for name in policy.same_labels]
    return [
        prefiller
        for prefiller in prefillers
        if all(labels.get(prefiller.address, NO_LABELS).get(name) == value for name, value in wanted)
    ]


def link_bytes_per_second(
    prefill: str, decode: str, labels: Labels, *, policy: Disaggregation, links: LinkEstimates
) -> float:
    """Return how fast a cache comes from one pod to the other.

    The first of the policy's `links` counts whose label both pods have alike. For all other pairs it is what the decode
    pod's fetches show, or `linkBytesPerSecond` until there are any.
    """
    here, there = labels.get(decode, NO_LABELS), labels.get(prefill, NO_LABELS)
    for link in policy.links:
        if (value := here.get(link.label)) is not None and there.get(link.label) == value:
            return link.bytes_per_second
    return links.bytes_per_second(decode, declared=policy.link_bytes_per_second)

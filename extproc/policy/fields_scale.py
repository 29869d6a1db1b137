"""The fields of `spec.disaggregation` and `spec.autoscale`, which nothing acts on yet; part of `policy_fields`."""

from collections.abc import Mapping

from extproc.policy.bounds import COUNT, REAL_SHARE, SHARE, at_most
from extproc.policy.field_kinds import Flag, Number, Property, Record, Rule

DISAGGREGATION = Record(
    properties={
        "enabled": Property(kind=Flag(), usual="false", words="split prefill from decode"),
        "promptTokens": Property(
            kind=COUNT, usual="256", words="uncached tokens from which on a prompt is sent elsewhere"
        ),
        "busyPromptTokens": Property(kind=COUNT, usual="64", words="the same where the decoding pod is busy"),
        "busyDecodes": Property(kind=COUNT, usual="8", words="requests in decoding from which on it is busy"),
        "prefillQueueRequests": Property(
            kind=COUNT, usual="10", words="waiting for prefill, from which on nothing more is sent there"
        ),
    }
)

SIGNALS: Mapping[str, Property] = {
    "queueRequests": Property(kind=Number(most=1e6), words="requests waiting at a pod, mean over the ready ones"),
    "kvUsage": Property(kind=REAL_SHARE, words="share of cache blocks in use, the same mean"),
    "gpuUtilization": Property(kind=SHARE, words="0..1, the same mean"),
}


def _up_above_down(signal: str) -> Rule:
    both = f"!has(self.scaleUp) || !has(self.scaleDown) || !has(self.scaleUp.{signal}) || !has(self.scaleDown.{signal})"
    return Rule(
        cel=f"{both} || self.scaleUp.{signal} > self.scaleDown.{signal}",
        message=f"scaleUp.{signal} must be above scaleDown.{signal}, or pods would come and go for ever",
        holds=lambda given: _is_above(given.get("scaleUp", {}).get(signal), given.get("scaleDown", {}).get(signal)),
        at="scaleUp",
    )


def _is_above(up: float | None, down: float | None) -> bool:
    return up is None or down is None or up > down


def _scale(words: str) -> Property:
    return Property(
        kind=Record(
            properties={
                "minReplicas": Property(kind=Number(most=10_000, whole=True), usual="1", words="never fewer pods"),
                "maxReplicas": Property(kind=Number(least=1, most=10_000, whole=True), words="never more"),
                "scaleUp": Property(kind=Record(properties=SIGNALS), words="more pods when any of these is reached"),
                "scaleDown": Property(kind=Record(properties=SIGNALS), words="fewer when all given are at or below"),
            },
            rules=(
                at_most("minReplicas", "maxReplicas"),
                *(_up_above_down(signal) for signal in SIGNALS),
            ),
        ),
        words=words,
    )


AUTOSCALE = Record(
    properties={
        "both": _scale("thresholds of pods that prefill and decode"),
        "prefill": _scale("thresholds of pods that only prefill"),
        "decode": _scale("thresholds of pods that only decode"),
    }
)

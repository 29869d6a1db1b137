"""When another pod computes a prompt than the one that decodes: the `disaggregation` section of a policy."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from extproc.policy.schema import (
    Amount,
    AmountOrZero,
    Count,
    Million,
    Name,
    Rule,
    Seconds,
    SecondsOrZero,
    Section,
    Share,
    about,
)


class Protocol(StrEnum):
    """How a prefill pod's cache gets to the decode pod; `disaggregation.transfer_protocols` has the forms."""

    NIXL = "nixl"  # vLLM's NixlConnector: prefill first, its answer's parameters go to the decode pod
    MOONCAKE = "mooncake"  # vLLM's MooncakeConnector: the same, by names that the prefill pod is asked for
    SHARED_STORAGE = "shared-storage"  # a store that all pods share, LMCache's: prefill first, no parameters
    SGLANG = "sglang"  # SGLang's bootstrap: both pods at once
    TRTLLM = "trtllm"  # TensorRT-LLM: the context phase first, its answer's parameters go to the generation phase
    SIDECAR = "sidecar"  # llm-d's sidecar in the decode pod runs the prefill leg; the picker names the prefill pod


class OffloadRule(StrEnum):
    """What decides whether a prompt is computed elsewhere; `disaggregation.offload` has the rules."""

    ESTIMATE = "estimate"  # compare the two expected times to the first token
    THRESHOLDS = "thresholds"  # compare lengths and queues with the thresholds of the section
    VOTES = "votes"  # add up the votes of the section
    ALWAYS = "always"  # wherever a prefill pod may serve


class VoteMetric(StrEnum):
    """What a vote looks at."""

    PREFILL_LENGTH = "prefill-length"  # tokens of the prompt that the decode pod does not hold
    PREFILL_QUEUE = "prefill-queue"  # requests that wait at the prefill pod or are on their way there
    DECODE_LOAD = "decode-load"  # requests that the decode pod runs
    TRANSFER_MS = "transfer-ms"  # what moving the cache takes, estimated


class VoteAction(StrEnum):
    """Which side a vote is for."""

    PREFER_REMOTE = "prefer-remote"
    PREFER_LOCAL = "prefer-local"


# both pods at once, or others run the leg: there is no answer that could come first
UNRACED = (Protocol.SGLANG, Protocol.SIDECAR)


def _races_where_legs_can(given: Mapping[str, Any]) -> bool:
    return not given.get("raceShare") or given.get("protocol") not in UNRACED


Port = Annotated[int, Meta(ge=1, le=65_535)]
LabelName = Annotated[Name, about("a label of pods")]
LabelValue = Annotated[str, Meta(max_length=63), about("exactly this value")]


class Vote(Section, frozen=True, kw_only=True):
    """One vote: where its metric is above its threshold, its weight counts for its side."""

    metric: Annotated[VoteMetric, about("what is compared")]
    threshold: Annotated[AmountOrZero, about("the vote counts where the metric is above this")]
    action: Annotated[VoteAction, about("prefer-remote adds the weight, prefer-local takes it away")]
    weight: Annotated[Million, about("how much the vote counts")]


class Link(Section, frozen=True, kw_only=True):
    """How fast caches move between pods that have a label alike: on one host, in one rack, in one zone."""

    label: Annotated[Name, about("a label of pods, e.g. `topology.kubernetes.io/zone`")]
    bytes_per_second: Annotated[Amount, about("between pods of which both have it, with the same value")]


class Disaggregation(Section, frozen=True, kw_only=True):
    """When another pod computes a prompt than the one that decodes, and how it gets there."""

    conditions = (
        Rule(
            cel="!has(self.raceShare) || self.raceShare <= 0.0 || !has(self.protocol)"
            f" || !(self.protocol in {[protocol.value for protocol in UNRACED]})",
            message="legs of the protocols sglang and sidecar cannot race: set raceShare to 0",
            holds=_races_where_legs_can,
            at="raceShare",
        ),
    )

    enabled: Annotated[bool, about("have prefill pods compute prompts for the pods that decode")] = False
    protocol: Annotated[Protocol, about("how the cache gets from pod to pod")] = Protocol.NIXL
    bootstrap_port: Annotated[Port, about("mooncake, sglang: the port of the prefill pods' bootstrap server")] = 8998
    prefill_selector: Annotated[
        Mapping[LabelName, LabelValue],
        Meta(max_length=16),
        about(
            "labels of the pods that only prefill; they go before the pods' own label `llm-d.ai/role`",
            entry=("name", "value"),
        ),
    ] = {}
    decode_selector: Annotated[
        Mapping[LabelName, LabelValue],
        Meta(max_length=16),
        about("labels of the pods that only decode", entry=("name", "value")),
    ] = {}
    rule: Annotated[OffloadRule, about("what decides whether a prompt is computed elsewhere")] = OffloadRule.ESTIMATE
    prompt_tokens: Annotated[Count, about("thresholds: uncached tokens from which on a prompt is sent elsewhere")] = 256
    busy_prompt_tokens: Annotated[Count, about("thresholds: the same where the decoding pod is busy")] = 64
    busy_decodes: Annotated[Count, about("thresholds: requests in decoding from which on a pod is busy")] = 8
    prefill_queue_requests: Annotated[
        Count, about("thresholds: requests waiting for prefill from which on no more is sent there")
    ] = 10
    votes: Annotated[tuple[Vote, ...], Meta(max_length=16), about("votes: what is added up")] = ()
    minimum_score: Annotated[Million, about("votes: a prompt is sent elsewhere where the sum is above this")] = 0.5
    kv_bytes_per_token: Annotated[
        Amount, about("estimate: bytes of cache a token, until the pods' transfers show them")
    ] = 131_072.0
    link_bytes_per_second: Annotated[
        Amount, about("estimate: bytes a second from pod to pod, until transfers show them")
    ] = 1.25e9
    links: Annotated[
        tuple[Link, ...],
        Meta(max_length=8),
        about("estimate: faster links, the fastest first; the first whose label a pair has alike counts for it"),
    ] = ()
    same_labels: Annotated[
        tuple[Name, ...],
        Meta(max_length=8),
        about("labels that a prefill pod has as its decode pod has them, or lacks as that does: a rollout's revision"),
    ] = ()
    hand_over_seconds: Annotated[
        SecondsOrZero, about("estimate: what a prefill leg takes besides: a request more, a transfer's beginning")
    ] = 0.01
    stalled_stream_weight: Annotated[
        Share,
        about(
            "estimate: a second by which a local prefill holds up another stream counts as so much of a second of "
            "the request's own"
        ),
    ] = 0.1
    queued_prompt_weight: Annotated[
        Share,
        about(
            "estimate: the same for each prompt that is open at the prefill pod: as many will probably come behind it"
        ),
    ] = 0.5
    missed_promise_weight: Annotated[
        Share,
        about("estimate: a way that misses what the class promises counts as so much of the promised time more"),
    ] = 0.25
    race_share: Annotated[
        Share,
        about(
            "racing: share of the prompts with a leg that two prefill pods compute at once, the first wins; not with "
            "sglang or sidecar"
        ),
    ] = 0.0
    race_ttft_seconds: Annotated[
        Seconds, about("racing: for the classes that promise a first token within this time")
    ] = 1.0
    timeout_seconds: Annotated[Seconds, about("a prefill leg is given up after this long at most")] = 30.0

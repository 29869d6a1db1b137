"""The `disaggregation` section of a policy: when a prefill pod computes the prompt for the decode pod."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

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
    matching,
)


class Protocol(StrEnum):
    """How the KV cache moves from prefill pod to decode pod; `disaggregation.transfer_protocols` has the formats."""

    NIXL = "nixl"  # vLLM's NixlConnector: prefill first, its answer's parameters go to the decode pod
    MOONCAKE = "mooncake"  # vLLM's MooncakeConnector: the same, but with names queried from the prefill pod
    SHARED_STORAGE = "shared-storage"  # a store shared by all pods, such as LMCache's: prefill first, no parameters
    SGLANG = "sglang"  # SGLang's bootstrap: both pods at once
    TRTLLM = "trtllm"  # TensorRT-LLM: the context phase first, its answer's parameters go to the generation phase
    SIDECAR = "sidecar"  # llm-d's sidecar in the decode pod sends the prefill request; the picker names the prefill pod


class OffloadRule(StrEnum):
    """The rule for sending a prompt to a prefill pod; `disaggregation.offload` implements the rules."""

    ESTIMATE = "estimate"  # compare the expected TTFTs with and without offload
    THRESHOLDS = "thresholds"  # compare lengths and queues with the section's thresholds
    VOTES = "votes"  # add up the section's votes
    ALWAYS = "always"  # whenever a prefill pod is available


class VoteMetric(StrEnum):
    """The input of a vote."""

    PREFILL_LENGTH = "prefill-length"  # prompt tokens that are not cached on the decode pod
    PREFILL_QUEUE = "prefill-queue"  # requests waiting at the prefill pod or on their way there
    DECODE_LOAD = "decode-load"  # running requests of the decode pod
    TRANSFER_MS = "transfer-ms"  # estimated time of the cache transfer


class VoteAction(StrEnum):
    """The side that a vote supports."""

    PREFER_REMOTE = "prefer-remote"
    PREFER_LOCAL = "prefer-local"


# both pods start at once, or the sidecar sends the prefill request: there is no prefill answer to race for
UNRACED = (Protocol.SGLANG, Protocol.SIDECAR)


Port = Annotated[int, Meta(ge=1, le=65_535)]
LabelName = Annotated[Name, about("a label of pods")]
SideChannelHost = Annotated[
    str, matching(r"^[-0-9A-Za-z._:]+(/[0-9]{1,3})?$", "a host's name, an address or a network", most=253)
]
LabelValue = Annotated[str, Meta(max_length=63), about("exact value")]


class Vote(Section, frozen=True, kw_only=True):
    """One vote: if its metric is above its threshold, its weight counts for its side."""

    metric: Annotated[VoteMetric, about("compared value")]
    threshold: Annotated[AmountOrZero, about("value above which the vote counts")]
    action: Annotated[VoteAction, about("prefer-remote adds the weight, prefer-local subtracts it")]
    weight: Annotated[Million, about("weight of the vote")]


class Link(Section, frozen=True, kw_only=True):
    """Transfer rate between pods with equal values of a label: on one host, in one rack, in one zone."""

    label: Annotated[Name, about("a label of pods, e.g. `topology.kubernetes.io/zone`")]
    bytes_per_second: Annotated[Amount, about("speed between pods with the same value")]


class Disaggregation(Section, frozen=True, kw_only=True):
    """When a prefill pod computes a prompt for the decode pod, and how the cache gets there."""

    conditions = (
        Rule(
            cel="!has(self.raceShare) || self.raceShare <= 0.0 || !has(self.protocol)"
            f" || !(self.protocol in {[protocol.value for protocol in UNRACED]})",
            message="legs of the protocols sglang and sidecar cannot race: set raceShare to 0",
            holds=lambda given: not given.get("raceShare") or given.get("protocol") not in UNRACED,
            at="raceShare",
        ),
    )

    enabled: Annotated[bool, about("let prefill pods compute prompts for decode pods")] = False
    protocol: Annotated[Protocol, about("protocol of the KV transfer")] = Protocol.NIXL
    bootstrap_port: Annotated[Port, about("mooncake, sglang: port of the prefill pods' bootstrap server")] = 8998
    side_channel_hosts: Annotated[
        tuple[SideChannelHost, ...],
        Meta(max_length=16),
        about("nixl, trtllm: further hosts and networks of the prefill pods' side channels"),
    ] = ()
    prefill_selector: Annotated[
        Mapping[LabelName, LabelValue],
        Meta(max_length=16),
        about(
            "labels of prefill-only pods; outrank the label `llm-d.ai/role`",
            entry=("name", "value"),
        ),
    ] = {}
    decode_selector: Annotated[
        Mapping[LabelName, LabelValue],
        Meta(max_length=16),
        about("labels of decode-only pods", entry=("name", "value")),
    ] = {}
    rule: Annotated[OffloadRule, about("rule for remote prefill")] = OffloadRule.ESTIMATE
    prompt_tokens: Annotated[Count, about("thresholds: minimum of uncached tokens for remote prefill")] = 256
    busy_prompt_tokens: Annotated[Count, about("thresholds: the same for a busy decode pod")] = 64
    busy_decodes: Annotated[Count, about("thresholds: minimum of decoding requests of a busy pod")] = 8
    prefill_queue_requests: Annotated[Count, about("thresholds: maximum of requests waiting for prefill")] = 10
    votes: Annotated[tuple[Vote, ...], Meta(max_length=16), about("votes: the votes to add up")] = ()
    minimum_score: Annotated[Million, about("votes: sum above which prefill is remote")] = 0.5
    kv_bytes_per_token: Annotated[Amount, about("estimate: cache bytes per token until transfers show them")] = (
        131_072.0
    )
    link_bytes_per_second: Annotated[Amount, about("estimate: transfer speed until transfers show it")] = 1.25e9
    links: Annotated[
        tuple[Link, ...],
        Meta(max_length=8),
        about("estimate: faster links, fastest first; the first label with equal values on both pods counts"),
    ] = ()
    same_labels: Annotated[
        tuple[Name, ...],
        Meta(max_length=8),
        about("labels that prefill and decode pod must share (or both lack), as a rollout's revision"),
    ] = ()
    hand_over_seconds: Annotated[SecondsOrZero, about("estimate: fixed time of a prefill request and its transfer")] = (
        0.01
    )
    race_share: Annotated[
        Share,
        about("racing: share of remote prompts computed by two prefill pods at once; not with sglang or sidecar"),
    ] = 0.0
    race_ttft_seconds: Annotated[Seconds, about("racing: only for classes with a TTFT target up to this")] = 1.0
    timeout_seconds: Annotated[Seconds, about("timeout of a prefill request")] = 30.0

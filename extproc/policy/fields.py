"""The fields of an InferencePolicy's `spec`, once: reader, CRD and the page's table are all made from this.

Bounds are those of `policy_document` and `models_document`, which read what comes out; a test holds them to it. Nothing
here has a default that would be written into documents: in merging, a namespace's default would hide the mesh's value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from extproc.policy.bounds import (
    AMOUNT,
    AMOUNT_OR_NONE,
    COUNT,
    COUNT_OR_NONE,
    POLICY,
    SECONDS,
    SECONDS_OR_NONE,
    SHARE,
)
from extproc.policy.field_kinds import Choice, Flag, ListOf, Number, Property, Record, Rule, Text
from extproc.policy.fields_load import LOAD
from extproc.policy.fields_models import MODELS
from extproc.policy.fields_observability import OBSERVABILITY
from extproc.policy.fields_priorities import PRIORITIES, QUOTAS
from extproc.policy.fields_scale import AUTOSCALE, DISAGGREGATION
from extproc.policy.values import SCORER_NAMES, TIER_WEIGHTS, Strategy

GATEWAY_GROUP, POOL_GROUP = "gateway.networking.k8s.io", "inference.networking.k8s.io"
GROUPS: Mapping[str, str] = {
    "InferencePool": POOL_GROUP,
    "Service": "",
    "Gateway": GATEWAY_GROUP,
    "HTTPRoute": GATEWAY_GROUP,
}
HOST = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"

TARGET_REF = Record(
    properties={
        "group": Property(kind=Text(least=0, most=253), default="", words='API group; "" for Service'),
        "kind": Property(kind=Choice(of=tuple(GROUPS)), required=True, words="what the policy applies to"),
        "name": Property(
            kind=Text(most=253, pattern=OBJECT_NAME, words="an object's name (lower case)"),
            required=True,
            words="its name, in the policy's own namespace",
        ),
    },
    rules=(
        Rule(
            cel="(self.kind == 'Service' && self.group == '')"
            f" || (self.kind == 'InferencePool' && self.group == '{POOL_GROUP}')"
            f" || (self.kind in ['Gateway', 'HTTPRoute'] && self.group == '{GATEWAY_GROUP}')",
            message=f"the group of InferencePool is {POOL_GROUP}, of Gateway and HTTPRoute {GATEWAY_GROUP}, "
            'of Service ""',
            holds=lambda given: given.get("group", "") == GROUPS[given["kind"]],
            at="group",
        ),
    ),
)

SCORING = Record(
    properties={
        "strategy": Property(
            kind=Choice(of=tuple(Strategy)),
            words="preset of the weights; where a more specific policy names one, wider policies' weights do not count",
            usual=Strategy.KV_AWARE,
        ),
        "weights": Property(
            kind=Record(
                properties={
                    name: Property(kind=Number(most=1e6), words="weight of this scorer; 0 takes it out", usual="preset")
                    for name in SCORER_NAMES
                }
            ),
            words="single weights on top of the preset",
        ),
        "scales": Property(
            kind=Record(
                properties={
                    "prefillTokens": Property(
                        kind=AMOUNT, usual="16384", words="prefill-work: the difference that is one whole point"
                    ),
                    "decodeTokens": Property(kind=AMOUNT, usual="65536", words="decode-work: the same"),
                    "queueRequests": Property(kind=AMOUNT, usual="4", words="queue-depth: the same"),
                    "activeRequests": Property(kind=AMOUNT, usual="8", words="active-requests: the same"),
                    "requestTokens": Property(
                        kind=AMOUNT_OR_NONE, usual="512", words="decode-work: what a sequence costs beside its context"
                    ),
                    "recomputeFactor": Property(
                        kind=AMOUNT, usual="2", words="prefill-work: waited tokens that a computed one counts"
                    ),
                    "waitingTokens": Property(
                        kind=AMOUNT_OR_NONE,
                        usual="512",
                        words="prefill-work: least tokens of a reported waiting request",
                    ),
                    "cacheTokens": Property(
                        kind=AMOUNT, usual="100000", words="cache-room: a pod's cache, where it does not tell"
                    ),
                    "memoryBytesPerSecond": Property(
                        kind=AMOUNT, usual="2e12", words="memory-bandwidth: what a pod's memory moves"
                    ),
                }
            ),
            words="the difference that scorers count as one whole point",
        ),
        "fallbacks": Property(
            kind=Number(most=16, whole=True), usual="2", words="endpoints named after the winner, for Envoy's retries"
        ),
        "sessionSeconds": Property(kind=SECONDS, usual="300", words="a session is remembered so long"),
    }
)

PREFIX_CACHE = Record(
    properties={
        "minimumHitRatio": Property(
            kind=SHARE,
            usual="0",
            words="gate: a match shorter than this share of the prompt makes an endpoint no better than none",
        ),
        "alertHitRatio": Property(
            kind=SHARE,
            usual="0",
            words="target for alerts: share of all prompt tokens that should be found in caches; 0: none",
        ),
        "tierWeights": Property(
            kind=Record(
                properties={
                    tier: Property(kind=SHARE, words="share of a GPU hit's worth", usual=f"{worth:g}")
                    for tier, worth in TIER_WEIGHTS.items()
                }
            ),
            words="what hits in slower tiers are worth",
        ),
        "recentSeconds": Property(
            kind=SECONDS_OR_NONE,
            usual="5",
            into=(*POLICY, "recent_prefix_seconds"),
            words="what was just routed to a pod is expected in its cache so long",
        ),
        "unfollowedSeconds": Property(
            kind=SECONDS_OR_NONE,
            usual="180",
            into=(*POLICY, "unfollowed_prefix_seconds"),
            words="the same for pods whose events nobody follows",
        ),
        "hotspot": Property(
            kind=Record(
                properties={
                    "enabled": Property(kind=Flag(), usual="true", words="hot prefixes are copied to a further pod"),
                    "pressure": Property(
                        kind=Number(most=1e6),
                        usual="1",
                        words="longer wait at its pod, as a share of what the hit saves",
                    ),
                    "leastRequests": Property(kind=COUNT_OR_NONE, usual="8", words="so many requests under pressure"),
                    "windowSeconds": Property(kind=SECONDS, usual="5", words="in such a time"),
                    "copies": Property(
                        kind=Number(most=1000, whole=True), usual="1", words="beside the first holder, for each prefix"
                    ),
                    "rememberSeconds": Property(kind=SECONDS, usual="60", words="a copy is remembered so long"),
                    "mostPrefixes": Property(kind=COUNT, usual="1024", words="remembered at a time"),
                }
            ),
            into=(*POLICY, "hotspot"),
            words="when a prefix is copied to a further pod on purpose",
        ),
    }
)


def _hosts_have_one_pool(spec: Mapping[str, Any]) -> bool:
    refs: Sequence[Mapping[str, Any]] = spec.get("targetRefs", ())
    return not spec.get("hosts") or (len(refs) == 1 and refs[0]["kind"] in ("InferencePool", "Service"))


SPEC = Record(
    properties={
        "targetRefs": Property(
            kind=ListOf(item=TARGET_REF, least=1, most=16, keys=("group", "kind", "name")),
            into=("target_refs",),
            words="what the policy applies to; left out: its namespace, and in the root namespace the mesh",
        ),
        "scoring": Property(kind=SCORING, into=POLICY, words="how endpoints are compared"),
        "prefixCache": Property(kind=PREFIX_CACHE, into=POLICY, words="what cached prefixes count for"),
        "load": Property(kind=LOAD, into=POLICY, words="when pods are full, and when they are avoided"),
        "priorities": Property(
            kind=PRIORITIES, into=(*POLICY, "priorities"), words="whose requests go first under load"
        ),
        "quotas": Property(
            kind=QUOTAS,
            into=(*POLICY, "priorities", "quotas"),
            words="what a tenant may use of a model; the first that matches counts",
        ),
        "disaggregation": Property(
            kind=DISAGGREGATION,
            into=(*POLICY, "disaggregation"),
            words="prefill apart from decode: read and shown, not acted on yet",
        ),
        "autoscale": Property(
            kind=AUTOSCALE,
            into=(*POLICY, "autoscale"),
            words="thresholds for replicas: read and shown, not acted on yet",
        ),
        "models": Property(
            kind=MODELS, into=("models",), words="what the pods serve, and which requests go to which model"
        ),
        "failureMode": Property(
            kind=Choice(of=("FailOpen", "FailClose")),
            into=("failure_mode",),
            usual="FailClose",
            words="when the picker can decide nothing: FailOpen sends requests to any ready pod, FailClose refuses "
            "them; without any picker Envoy does what `kvmesh install --failure-mode` says",
        ),
        "observability": Property(
            kind=OBSERVABILITY,
            into=(*POLICY, "observability"),
            words="what is looked at, written down and shown",
        ),
        "hosts": Property(
            kind=ListOf(
                item=Text(most=253, pattern=HOST, words="a host in lower case, or *.domain"), most=32, unique=True
            ),
            into=("hosts",),
            words="hosts that tell the pool from others; only with one target, an InferencePool or a Service",
        ),
    },
    rules=(
        Rule(
            cel="!has(self.hosts) || size(self.hosts) == 0 || (has(self.targetRefs) && size(self.targetRefs) == 1"
            " && self.targetRefs[0].kind in ['InferencePool', 'Service'])",
            message="hosts lead to one pool: name it as the only target (an InferencePool or a Service)",
            holds=_hosts_have_one_pool,
            at="hosts",
        ),
    ),
)

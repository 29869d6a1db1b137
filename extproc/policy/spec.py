"""The `spec` of an InferencePolicy: its sections put together, and those that only documents have.

This declaration, with `policy.values` and `policy.priority`, is the only one: documents are read by it, `policy.crd`
writes the definition and `policy.table` the table in docs/reference/inference-policy.md.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from extproc.models.models import StickyBy, TokensFrom
from extproc.policy.autoscale import Autoscale
from extproc.policy.disaggregation import Disaggregation
from extproc.policy.priority import Priorities, Quota
from extproc.policy.schema import (
    HeaderName,
    Name,
    Rule,
    Section,
    Tokens,
    about,
    matching,
)
from extproc.policy.values import Load, ObservabilityPolicy, PrefixCache, Scoring

GATEWAY_GROUP, POOL_GROUP, CORE_GROUP = "gateway.networking.k8s.io", "inference.networking.k8s.io", ""
GROUPS: Mapping[str, str] = {
    "Gateway": GATEWAY_GROUP,
    "HTTPRoute": GATEWAY_GROUP,
    "InferencePool": POOL_GROUP,
    "Service": CORE_GROUP,
}
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
ObjectName = Annotated[str, matching(OBJECT_NAME, "an object's name (lower case)", most=253)]
Host = Annotated[
    str,
    matching(
        r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        "a host in lower case, or *.domain",
        most=253,
    ),
]


class TargetRef(Section, frozen=True, kw_only=True):
    """What a policy applies to, in its own namespace."""

    conditions = (
        Rule(
            cel="(self.kind == 'Service' && self.group == '')"
            f" || (self.kind == 'InferencePool' && self.group == '{POOL_GROUP}')"
            f" || (self.kind in ['Gateway', 'HTTPRoute'] && self.group == '{GATEWAY_GROUP}')",
            message=f"the group of InferencePool is {POOL_GROUP}, of Gateway and HTTPRoute {GATEWAY_GROUP}, "
            'of Service ""',
            holds=lambda given: given.get("group", "") == GROUPS[given["kind"]],
            at="group",
        ),
    )

    group: Annotated[str, Meta(max_length=253), about('API group; "" for Service')] = ""
    kind: Annotated[Literal["Gateway", "HTTPRoute", "InferencePool", "Service"], about("what the policy applies to")]
    name: Annotated[ObjectName, about("its name, in the policy's own namespace")]


# --- models -----------------------------------------------------------------------------------------------------------


class Served(Section, frozen=True, kw_only=True):
    """One base model of the pods."""

    conditions = (
        Rule(
            cel="!has(self.tokens) || self.tokens != 'tokenizer' || has(self.tokenizer)",
            message="tokens from a tokenizer need its folder",
            holds=lambda model: model.get("tokens") != TokensFrom.TOKENIZER or "tokenizer" in model,
            at="tokens",
        ),
    )

    name: Annotated[Name, about("the first of vLLM's --served-model-name")]
    aliases: Annotated[frozenset[Name], Meta(max_length=64), about("its further served names")] = frozenset()
    adapters: Annotated[
        frozenset[Name], Meta(max_length=1024), about("LoRA adapters; those that pods report need not be listed")
    ] = frozenset()
    tokens: Annotated[
        TokensFrom | None,
        about(
            "where token ids come from: the folder, the pods (auto), their render endpoint alone, or nowhere (text)",
            default="tokenizer with a folder, else auto",
        ),
    ] = None
    tokenizer: Annotated[Path | None, about("folder in the picker's container")] = None
    chat_template: Annotated[Path | None, about("file in the picker's container, in place of the folder's")] = None
    chat_template_kwargs: Annotated[
        Mapping[
            Annotated[str, Meta(min_length=1, max_length=128), about("name of the argument")],
            Annotated[str, Meta(max_length=1024), about("JSON where it is, else a text")],
        ],
        Meta(max_length=16),
        about("vLLM's --default-chat-template-kwargs", entry=("name", "value")),
    ] = {}
    max_model_len: Annotated[Tokens | None, about("tokens of prompt and output", default="as pods report")] = None


class Target(Section, frozen=True, kw_only=True):
    """One arm of a rule."""

    model: Annotated[Name, about("the name that the pod gets")]
    weight: Annotated[float, Meta(ge=0, le=10**9), about("its share; 0 stops the arm")] = 1.0


class Rewrite(Section, frozen=True, kw_only=True):
    """What becomes of requests for one name."""

    conditions = (
        Rule(
            cel="(has(self.stickyBy) && self.stickyBy == 'header') == has(self.stickyHeader)",
            message="stickyHeader is needed with stickyBy: header, and only there",
            holds=lambda rule: (rule.get("stickyBy") == StickyBy.HEADER) == ("stickyHeader" in rule),
            at="stickyBy",
        ),
    )

    model: Annotated[Name, about('as clients write it; "*": every name without a rule')]
    targets: Annotated[
        tuple[Target, ...],
        Meta(min_length=1, max_length=16),
        about(
            "one: a rewrite; several: a split by weight",
            keys=("model",),
            rules=(
                Rule(
                    cel="self.exists(t, !has(t.weight) || t.weight > 0.0)",
                    message="at least one weight must be above 0",
                    holds=lambda targets: any(target.get("weight") != 0 for target in targets),
                ),
            ),
        ),
    ]
    sticky_by: Annotated[StickyBy, about("what keeps a client on its target")] = StickyBy.NOTHING
    sticky_header: Annotated[HeaderName | None, about("with stickyBy: header")] = None
    fallbacks: Annotated[
        tuple[Name, ...],
        Meta(max_length=16),
        about("models tried in order when no endpoint of the target is ready", unique=True),
    ] = ()


class Models(Section, frozen=True, kw_only=True):
    """What the pods serve, and which requests go to which model."""

    served: Annotated[tuple[Served, ...], Meta(max_length=64), about("the pods' base models", keys=("name",))] = ()
    rules: Annotated[
        tuple[Rewrite, ...], Meta(max_length=256), about("what becomes of requests for a name", keys=("model",))
    ] = ()
    only_listed: Annotated[bool, about("true: any other name is answered 404")] = False


# --- the whole --------------------------------------------------------------------------------------------------------


def _hosts_have_one_pool(spec: Mapping[str, Any]) -> bool:
    refs: Sequence[Mapping[str, Any]] = spec.get("targetRefs", ())
    return not spec.get("hosts") or (len(refs) == 1 and refs[0]["kind"] in ("InferencePool", "Service"))


class Spec(Section, frozen=True, kw_only=True):
    """All that a policy may say."""

    conditions = (
        Rule(
            cel="!has(self.hosts) || size(self.hosts) == 0 || (has(self.targetRefs) && size(self.targetRefs) == 1"
            " && self.targetRefs[0].kind in ['InferencePool', 'Service'])",
            message="hosts lead to one pool: name it as the only target (an InferencePool or a Service)",
            holds=_hosts_have_one_pool,
            at="hosts",
        ),
    )

    target_refs: Annotated[
        tuple[TargetRef, ...],
        Meta(min_length=1, max_length=16),
        about(
            "what the policy applies to; left out: its namespace, and in the root namespace the mesh",
            keys=("group", "kind", "name"),
        ),
    ] = ()
    scoring: Annotated[Scoring, about("how endpoints are compared")] = Scoring()
    prefix_cache: Annotated[PrefixCache, about("what cached prefixes count for")] = PrefixCache()
    load: Annotated[Load, about("when pods are full, and when they are avoided")] = Load()
    priorities: Annotated[Priorities, about("whose requests go first under load")] = Priorities()
    quotas: Annotated[
        tuple[Quota, ...],
        Meta(max_length=256),
        about("what a tenant may use of a model; the first that matches counts"),
    ] = ()
    disaggregation: Annotated[Disaggregation, about("when another pod computes a prompt than the one that decodes")] = (
        Disaggregation()
    )
    autoscale: Annotated[Autoscale, about("how many pods are wanted, by role: told to what scales them")] = Autoscale()
    models: Annotated[Models, about("what the pods serve, and which requests go to which model")] = Models()
    shadow: Annotated[
        bool,
        about(
            "true: what would be refused, held back, degraded, offloaded or scaled is counted and shown, and not done"
        ),
    ] = False
    failure_mode: Annotated[
        Literal["FailClose", "FailOpen"],
        about(
            "when the picker can decide nothing: FailOpen sends requests to any ready pod, FailClose refuses them; "
            "without any picker Envoy does what `kvmesh install --failure-mode` says"
        ),
    ] = "FailClose"
    observability: Annotated[ObservabilityPolicy, about("what is looked at, written down and shown")] = (
        ObservabilityPolicy()
    )
    hosts: Annotated[
        tuple[Host, ...],
        Meta(max_length=32),
        about("hosts that tell the pool from others; only with one target, an InferencePool or a Service", unique=True),
    ] = ()

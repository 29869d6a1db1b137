"""The `spec` of an InferencePolicy: all sections, including the ones used only in documents.

This declaration, with `policy.values` and `policy.priority`, is the only one: documents are read by it,
`tools.policy_crd` writes the CRD, and `tools.policy_table` the table in docs/reference/inference-policy.md.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from extproc.models.models import StickyBy, TokensFrom
from extproc.policy.autoscale import Autoscale
from extproc.policy.disaggregation import Disaggregation
from extproc.policy.priority import Priorities, Quota
from extproc.policy.profiles import Profile
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
    """A target of a policy, in the policy's namespace."""

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
    kind: Annotated[Literal["Gateway", "HTTPRoute", "InferencePool", "Service"], about("kind of the target")]
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

    name: Annotated[Name, about("first of vLLM's --served-model-name")]
    aliases: Annotated[frozenset[Name], Meta(max_length=64), about("further served names")] = frozenset()
    adapters: Annotated[
        frozenset[Name], Meta(max_length=1024), about("LoRA adapters; reported ones need not be listed")
    ] = frozenset()
    tokens: Annotated[
        TokensFrom | None,
        about(
            "source of token ids: folder, pods (auto), only their render endpoint, or none (text)",
            default="tokenizer with a folder, else auto",
        ),
    ] = None
    tokenizer: Annotated[Path | None, about("folder in the picker's container")] = None
    chat_template: Annotated[Path | None, about("file in the picker's container that replaces the folder's")] = None
    chat_template_kwargs: Annotated[
        Mapping[
            Annotated[str, Meta(min_length=1, max_length=128), about("name of the argument")],
            Annotated[str, Meta(max_length=1024), about("JSON, else a text")],
        ],
        Meta(max_length=16),
        about("vLLM's --default-chat-template-kwargs", entry=("name", "value")),
    ] = {}
    max_model_len: Annotated[Tokens | None, about("maximum tokens of prompt and output", default="as pods report")] = (
        None
    )


class Target(Section, frozen=True, kw_only=True):
    """One arm of a rule."""

    model: Annotated[Name, about("name for the pod")]
    weight: Annotated[float, Meta(ge=0, le=10**9), about("its share; 0 stops the variant")] = 1.0


class Rewrite(Section, frozen=True, kw_only=True):
    """The rewrite or split of requests for one name."""

    conditions = (
        Rule(
            cel="(has(self.stickyBy) && self.stickyBy == 'header') == has(self.stickyHeader)",
            message="stickyHeader is needed with stickyBy: header, and only there",
            holds=lambda rule: (rule.get("stickyBy") == StickyBy.HEADER) == ("stickyHeader" in rule),
            at="stickyBy",
        ),
    )

    model: Annotated[Name, about('the client\'s name; "*": every name without a rule')]
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
    sticky_by: Annotated[StickyBy, about("key that keeps a client on its target")] = StickyBy.NOTHING
    sticky_header: Annotated[HeaderName | None, about("with stickyBy: header")] = None
    fallbacks: Annotated[
        tuple[Name, ...],
        Meta(max_length=16),
        about("models tried in order if no endpoint of the target is ready", unique=True),
    ] = ()


class Models(Section, frozen=True, kw_only=True):
    """The models of the pods, and the routing of requests to them."""

    served: Annotated[tuple[Served, ...], Meta(max_length=64), about("base models of the pods", keys=("name",))] = ()
    rules: Annotated[
        tuple[Rewrite, ...], Meta(max_length=256), about("rewrites and splits by name", keys=("model",))
    ] = ()
    only_listed: Annotated[bool, about("true: other names get 404")] = False


# --- the whole --------------------------------------------------------------------------------------------------------


def _hosts_have_one_pool(spec: Mapping[str, Any]) -> bool:
    refs: Sequence[Mapping[str, Any]] = spec.get("targetRefs", ())
    return not spec.get("hosts") or (len(refs) == 1 and refs[0]["kind"] in ("InferencePool", "Service"))


class Spec(Section, frozen=True, kw_only=True):
    """All fields of a policy."""

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
            "targets of the policy; default: its namespace, and in the root namespace the mesh",
            keys=("group", "kind", "name"),
        ),
    ] = ()
    profile: Annotated[Profile | None, about("base for a workload, below all given fields", default="none")] = None
    scoring: Annotated[Scoring, about("comparison of endpoints")] = Scoring()
    prefix_cache: Annotated[PrefixCache, about("value of cached prefixes")] = PrefixCache()
    load: Annotated[Load, about("limits and avoidance of pods")] = Load()
    priorities: Annotated[Priorities, about("order of requests under load")] = Priorities()
    quotas: Annotated[
        tuple[Quota, ...],
        Meta(max_length=256),
        about("limits of a tenant's use of a model; the first match counts"),
    ] = ()
    disaggregation: Annotated[Disaggregation, about("prefill on other pods than decode")] = Disaggregation()
    autoscale: Annotated[Autoscale, about("desired pods by role, reported to autoscalers")] = Autoscale()
    models: Annotated[Models, about("served models, and rewrites of model names")] = Models()
    shadow: Annotated[
        bool,
        about("true: only count and show refusals, waits, degradations, offloads and scaling"),
    ] = False
    failure_mode: Annotated[
        Literal["FailClose", "FailOpen"],
        about(
            "requests without a decision: FailOpen sends them to any ready pod, FailClose refuses them; without any "
            "picker `kvmesh install --failure-mode` counts"
        ),
    ] = "FailClose"
    observability: Annotated[ObservabilityPolicy, about("sampling, records and display")] = ObservabilityPolicy()
    hosts: Annotated[
        tuple[Host, ...],
        Meta(max_length=32),
        about(
            "hosts of the pool, among others on the same gateway; only with one target, an InferencePool or a Service",
            unique=True,
        ),
    ] = ()

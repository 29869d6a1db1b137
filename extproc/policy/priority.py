"""Priority classes, tenants, quotas and overload behaviour, as the operator declares them.

These values also declare the fields in an InferencePolicy, as in `policy.values`; docs/guides/priorities.md explains
them. Units are seconds, tokens and shares (0..1). A higher priority is more important, as in InferenceObjective.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from extproc.policy.schema import (
    Count,
    CountOrZero,
    Factor,
    HeaderName,
    Name,
    RealShare,
    Rule,
    Seconds,
    SecondsOrZero,
    Section,
    Share,
    Tokens,
    about,
    matching,
)
from extproc.policy.targets import MLPERF_TARGETS, TARGETS, NamedTargets, Targets, Tolerance

ANY = "*"
# headers with a fixed meaning for the picker
OWN_HEADERS = ("x-gateway-inference-objective", ":path", ":method", "x-request-id", "traceparent")
_OWN_HEADERS_CEL = f"[{', '.join(repr(name) for name in OWN_HEADERS)}]"
_NAME_PATTERN = r"^[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$"
# used in response headers and metric labels
ClassName = Annotated[str, matching(_NAME_PATTERN, "a class's name: letters, digits, '-', '_' and '.'", most=63)]
ObjectiveName = Annotated[
    str, matching(_NAME_PATTERN, "an objective's name: letters, digits, '-', '_' and '.'", most=253)
]
Value = Annotated[str, Meta(min_length=1, max_length=1024)]
Objective = Annotated[float, Meta(gt=0, le=0.9999)]  # below 1, as an error budget of 0 could never be spent
AMinute = Annotated[float, Meta(ge=0, le=10**15)]


USUAL_OBJECTIVE, SHEDDABLE_OBJECTIVE = 0.99, 0.9  # default shares of a class's requests within all targets


class StepKind(StrEnum):
    """A degradation of a class before it is refused."""

    CAP_OUTPUT = "cap-output"  # max_tokens of at most `tokens`, also if the request has none
    LIMIT_PROMPT = "limit-prompt"  # prompts of more than `tokens` are refused with 413
    SMALLER_MODEL = "smaller-model"  # `model` instead of the requested one
    NO_REMOTE_PREFILL = "no-remote-prefill"  # a prefill pod named in the request is not used
    REJECT = "reject"


class DegradationStep(Section, frozen=True, kw_only=True):
    """One step, in force from the pressure `enter` until the pressure is below `leave`.

    Pressure is the larger of two ratios: the expected TTFT of a new request of the class over its target, and the
    inter-token time at the fastest endpoint over its target.
    """

    conditions = (
        Rule(
            cel="self.leave < self.enter",
            message="leave must be below enter",
            holds=lambda step: step["leave"] < step["enter"],
            at="leave",
        ),
        Rule(
            cel="(self.step in ['cap-output', 'limit-prompt']) == has(self.tokens)",
            message="cap-output and limit-prompt need tokens, the other steps have none",
            holds=lambda step: (step["step"] in (StepKind.CAP_OUTPUT, StepKind.LIMIT_PROMPT)) == ("tokens" in step),
            at="step",
        ),
        Rule(
            cel="(self.step == 'smaller-model') == has(self.model)",
            message="smaller-model needs a model, the other steps have none",
            holds=lambda step: (step["step"] == StepKind.SMALLER_MODEL) == ("model" in step),
            at="step",
        ),
    )

    step: Annotated[StepKind, about("the degradation")]
    enter: Annotated[Factor, about("pressure that starts the step: expected time as a share of the target")]
    leave: Annotated[Factor, about("pressure that ends the step")]
    least_seconds: Annotated[SecondsOrZero, about("minimum duration of a step")] = 5.0
    tokens: Annotated[Tokens, about("limit of cap-output and limit-prompt", default="")] = 0
    model: Annotated[Name, about("model of smaller-model", default="")] = ""


class PriorityClass(Section, frozen=True, kw_only=True):
    """One priority class: targets, limits and degradation of its requests."""

    conditions = (
        Rule(
            cel="!has(self.sheddable) || self.sheddable || !has(self.degrade)"
            " || self.degrade.all(s, s.step != 'reject')",
            message="only sheddable classes may be refused: a reject step needs sheddable: true",
            holds=lambda given: (
                given.get("sheddable") is not False
                or all(step["step"] != StepKind.REJECT for step in given.get("degrade", ()))
            ),
            at="degrade",
        ),
    )

    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1), about("higher goes first, strictly")] = 0
    # requests of other classes wait, and are sent on when their queue time is over
    sheddable: Annotated[bool, about("true: requests may be refused; others wait")] = False
    tolerance: Annotated[Tolerance, about("patience of the users; sets the missing targets")] = Tolerance.SECONDS
    named_targets: Annotated[
        NamedTargets | None, about("TTFT and inter-token targets by name; they limit no pod", default="tolerance")
    ] = msgspec.field(default=None, name="targets")
    ttft_seconds: Annotated[Seconds | None, about("TTFT target", default="tolerance")] = None
    inter_token_seconds: Annotated[
        Seconds | None,
        about(
            "mean inter-token target; if given, a pod that would break it is full",
            default="tolerance",
        ),
    ] = None
    queue_seconds: Annotated[SecondsOrZero | None, about("longest wait in the queue", default="tolerance")] = None
    attainment: Annotated[
        Objective | None,
        about("share of requests within the targets, for alerts", default="0.99; 0.9 if sheddable"),
    ] = None
    queue_requests: Annotated[CountOrZero, about("maximum of the class's waiting requests in one replica")] = 1000
    wait_from_zero_seconds: Annotated[
        SecondsOrZero | None,
        about(
            "longest wait for a pool's first pod (scaled to zero); 0: refuse at once",
            default="the pool's, which is the most",
        ),
    ] = None
    reserved_share: Annotated[Share, about("guaranteed share of sent tokens while requests wait")] = 0.0
    ceiling: Annotated[RealShare, about("usable share of a pod's limits")] = 1.0
    refusal_status: Annotated[Literal[429, 503], about("HTTP status of refusals")] = 503
    degrade: Annotated[
        tuple[DegradationStep, ...],
        Meta(max_length=16),
        about("degradation steps before refusal", default="none"),
    ] = ()

    @property
    def objective(self) -> float:
        """The SLO: the share of its requests within all targets."""
        if self.attainment is not None:
            return self.attainment
        return SHEDDABLE_OBJECTIVE if self.sheddable else USUAL_OBJECTIVE

    @property
    def targets(self) -> Targets:
        """The targets: its own fields, with those by name and then the tolerance's as defaults."""
        default = TARGETS[self.tolerance]
        ttft, inter_token = default.ttft_seconds, default.inter_token_seconds
        if self.named_targets is not None:
            ttft, inter_token = MLPERF_TARGETS[self.named_targets]
        return Targets(
            ttft_seconds=ttft if self.ttft_seconds is None else self.ttft_seconds,
            inter_token_seconds=inter_token if self.inter_token_seconds is None else self.inter_token_seconds,
            queue_seconds=default.queue_seconds if self.queue_seconds is None else self.queue_seconds,
        )


CRITICAL, STANDARD, SHEDDABLE = "critical", "standard", "sheddable"
DEFAULT_CLASSES: Mapping[str, PriorityClass] = MappingProxyType(
    {
        CRITICAL: PriorityClass(priority=100, tolerance=Tolerance.MILLISECONDS),
        STANDARD: PriorityClass(priority=0, tolerance=Tolerance.SECONDS, ceiling=0.8),
        SHEDDABLE: PriorityClass(
            priority=-100, sheddable=True, tolerance=Tolerance.MINUTES, reserved_share=0.05, ceiling=0.6
        ),
    }
)

_CONDITIONS = ("headers", "pathPrefix", "models", "claims")


class ClassRule(Section, frozen=True, kw_only=True):
    """Requests that match every given condition belong to `priority_class`; the first matching rule counts."""

    conditions = (
        Rule(
            cel=" || ".join(f"(has(self.{name}) && size(self.{name}) > 0)" for name in _CONDITIONS),
            message="matches every request: give headers, pathPrefix, models or claims, or set defaultClass",
            holds=lambda rule: any(rule.get(name) for name in _CONDITIONS),
        ),
    )

    priority_class: Annotated[ClassName, about("class of requests that match all conditions")]
    headers: Annotated[
        Mapping[
            Annotated[HeaderName, about("name in lower case")],
            Annotated[Value, about('exact value, or "*" for any')],
        ],
        Meta(max_length=16),
        about(
            "headers of the request",
            entry=("name", "value"),
            rules=(
                Rule(
                    cel=f"!(self.name in {_OWN_HEADERS_CEL})",
                    message=f"the picker reads {', '.join(OWN_HEADERS)} itself: use objectives or pathPrefix",
                    holds=lambda header: header["name"] not in OWN_HEADERS,
                    at="name",
                ),
            ),
        ),
    ] = {}
    path_prefix: Annotated[
        str,
        matching(r"^/[^?]*$", "a path that starts with '/' and has no '?'", most=1024),
        about("beginning of the path"),
    ] = ""
    models: Annotated[
        tuple[Name, ...],
        Meta(max_length=64),
        about(
            "the client's model names",
            rules=(
                Rule(
                    cel="self.all(m, m != '*')",
                    message="'*' is no model's name: leave models out for all of them",
                    holds=lambda models: ANY not in models,
                ),
            ),
        ),
    ] = ()
    claims: Annotated[
        Mapping[
            Annotated[Name, about("name of the claim; a.b is b within a")],
            Annotated[Value, about('exact value or a list\'s item, or "*" for any')],
        ],
        Meta(max_length=16),
        about("claims of the JWT verified by Envoy", entry=("name", "value")),
    ] = {}
    trust_objective: Annotated[
        bool | None, about("true: the objective may raise these requests", default="as the policy")
    ] = None


_LIMITS = ("requestsPerMinute", "promptTokensPerMinute", "generatedTokensPerMinute", "concurrentRequests")


class Quota(Section, frozen=True, kw_only=True):
    """Limits of one tenant on one model; None is no limit. The first matching quota counts."""

    conditions = (
        Rule(
            cel=" || ".join(f"has(self.{name})" for name in _LIMITS),
            message=f"limits nothing: give {', '.join(_LIMITS[:-1])} or {_LIMITS[-1]}",
            holds=lambda quota: any(name in quota for name in _LIMITS),
        ),
    )

    tenant: Annotated[Name, about('a tenant, or "*": each tenant')] = ANY
    model: Annotated[Name, about('a model, or "*": each model')] = ANY
    requests_per_minute: Annotated[AMinute | None, about("admitted requests")] = None
    prompt_tokens_per_minute: Annotated[AMinute | None, about("prompt tokens, cached or not")] = None
    generated_tokens_per_minute: Annotated[AMinute | None, about("answer tokens")] = None
    concurrent_requests: Annotated[CountOrZero | None, about("open requests")] = None
    burst_seconds: Annotated[Seconds, about("burst, as seconds of the rate")] = 10.0


class OverloadPolicy(Section, frozen=True, kw_only=True):
    """When endpoints count as full, and which requests wait or are refused."""

    enabled: Annotated[bool, about("false: send every request at once")] = True
    # an endpoint is full when any of the next three is reached; a class's `ceiling` scales all of them
    waiting_requests: Annotated[Count, about("full pod: this many waiting requests")] = 1
    kv_usage: Annotated[RealShare, about("full pod: this share of cache blocks in use")] = 0.95
    backlog_seconds: Annotated[Seconds, about("full pod: this much time of queued prompts")] = 0.2
    slow_start_seconds: Annotated[SecondsOrZero, about("ramp of a new pod's limits")] = 10.0
    queue_requests: Annotated[CountOrZero, about("maximum of waiting requests in one replica, all classes")] = 4000


FAIRNESS_HEADER = "x-gateway-inference-fairness-id"  # clients set it themselves


class Tenants(Section, frozen=True, kw_only=True):
    """The source of a request's tenant."""

    conditions = (
        Rule(
            cel=f"!has(self.header) || !(self.header in {_OWN_HEADERS_CEL})",
            message=f"{', '.join(OWN_HEADERS)} name no tenant",
            holds=lambda tenants: tenants.get("header") not in OWN_HEADERS,
            at="header",
        ),
    )

    header: Annotated[
        Annotated[str, matching(r"^(:?[-!#$%&'*+.^_`|~0-9a-z]+)?$", "a header's name in lower case", most=128, least=0)]
        | None,
        about('tenant header; "": none', default=f"{FAIRNESS_HEADER}, or none with a claim"),
    ] = None
    claim: Annotated[
        str,
        Meta(max_length=256),
        about("tenant claim of the verified JWT, before the header", default="none"),
    ] = ""


class Priorities(Section, frozen=True, kw_only=True):
    """The classes, and the rules that give requests a class and a tenant."""

    classes: Annotated[
        Mapping[Annotated[ClassName, about("name in x-kvmesh-priority and metrics")], PriorityClass],
        Meta(max_length=64),
        about(
            "request classes, merged by name and field with the default and wider policies' ones",
            default=", ".join(DEFAULT_CLASSES),
            entry=("name", ""),
        ),
    ] = msgspec.field(default_factory=lambda: DEFAULT_CLASSES)
    default_class: Annotated[ClassName, about("class of all other requests")] = STANDARD
    rules: Annotated[tuple[ClassRule, ...], Meta(max_length=128), about("first match sets the class")] = ()
    objectives: Annotated[
        Mapping[
            Annotated[ObjectiveName, about("name in x-gateway-inference-objective")],
            Annotated[ClassName, about("its class")],
        ],
        Meta(max_length=256),
        about(
            "objective names and their classes, before InferenceObjectives of the pool",
            entry=("name", "priorityClass"),
        ),
    ] = {}
    trust_objective: Annotated[bool, about("false: the header may only lower a request")] = False
    tenants: Annotated[Tenants, about("source of a request's tenant")] = Tenants()
    engine_priority: Annotated[
        bool, about("true: send the class's priority to pods (vLLM with --scheduling-policy priority)")
    ] = False


PRIORITIES = Priorities()

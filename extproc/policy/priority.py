"""Priority classes, tenants, quotas and what happens under load, as the operator declares them.

Values, and at once the declaration of their fields in an InferencePolicy, as in `policy.values`;
docs/guides/priorities.md explains them. Seconds, tokens and shares (0..1) throughout. A higher priority is more
important, as in InferenceObjective.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    at_most,
    matching,
)

ANY = "*"
# what the picker reads for purposes of its own
OWN_HEADERS = ("x-gateway-inference-objective", ":path", ":method", "x-request-id", "traceparent")
_OWN_HEADERS_CEL = f"[{', '.join(repr(name) for name in OWN_HEADERS)}]"
_NAME_PATTERN = r"^[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$"
# it stands in response headers and labels
ClassName = Annotated[str, matching(_NAME_PATTERN, "a class's name: letters, digits, '-', '_' and '.'", most=63)]
ObjectiveName = Annotated[
    str, matching(_NAME_PATTERN, "an objective's name: letters, digits, '-', '_' and '.'", most=253)
]
Value = Annotated[str, Meta(min_length=1, max_length=1024)]
Objective = Annotated[float, Meta(gt=0, le=0.9999)]  # below 1: something must be left to be spent
AMinute = Annotated[float, Meta(ge=0, le=10**15)]


class Tolerance(StrEnum):
    """How long users of a class wait gladly: sets the targets that the class does not give itself."""

    MILLISECONDS = "milliseconds"  # in the loop: code completion, search answers
    SECONDS = "seconds"  # chat, drafting
    MINUTES = "minutes"  # summaries, research agents
    HOURS = "hours"  # nightly batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a class is promised, in seconds."""

    ttft_seconds: float  # from the request's arrival here to the first token
    inter_token_seconds: float
    queue_seconds: float  # longest wait in the queue


# by tolerance; the queue's limits stay below what HTTP clients wait for (the openai SDK: 600 s)
TARGETS: Mapping[Tolerance, Targets] = MappingProxyType(
    {
        Tolerance.MILLISECONDS: Targets(ttft_seconds=0.5, inter_token_seconds=0.05, queue_seconds=2.0),
        Tolerance.SECONDS: Targets(ttft_seconds=5.0, inter_token_seconds=0.1, queue_seconds=30.0),
        Tolerance.MINUTES: Targets(ttft_seconds=60.0, inter_token_seconds=0.5, queue_seconds=120.0),
        Tolerance.HOURS: Targets(ttft_seconds=1800.0, inter_token_seconds=5.0, queue_seconds=300.0),
    }
)


USUAL_OBJECTIVE, SHEDDABLE_OBJECTIVE = 0.99, 0.9  # shares of a class's requests within all targets


class Order(StrEnum):
    """Which of one tenant's waiting requests goes first."""

    SHORTEST_WORK = "shortest-work"  # fewest uncached tokens, but no request waits longer than the age bound
    FIRST_COME = "first-come"


class StepKind(StrEnum):
    """What is taken from a class before it is refused."""

    CAP_OUTPUT = "cap-output"  # max_tokens at most `tokens`, also where the request names none
    LIMIT_PROMPT = "limit-prompt"  # prompts of more than `tokens` are refused with 413
    SMALLER_MODEL = "smaller-model"  # `model` in place of the one asked for
    NO_REMOTE_PREFILL = "no-remote-prefill"  # a prefiller that the request names is not used
    REJECT = "reject"


class DegradationStep(Section, frozen=True, kw_only=True):
    """One step, taken from the pressure `enter` on until it is below `leave`.

    Pressure is the TTFT that a newcomer of the class must expect now as a share of the class's target, or the time a
    token at the quickest endpoint as a share of its target where that is more.
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

    step: Annotated[StepKind, about("what is taken from the class")]
    enter: Annotated[Factor, about("in force from this pressure on: expected time as a share of the target")]
    leave: Annotated[Factor, about("until the pressure is below this one")]
    least_seconds: Annotated[SecondsOrZero, about("a step lasts at least this long once entered")] = 5.0
    tokens: Annotated[Tokens, about("the limit of cap-output and limit-prompt", default="")] = 0
    model: Annotated[Name, about("the model that answers with smaller-model", default="")] = ""


class PriorityClass(Section, frozen=True, kw_only=True):
    """What requests of one class may expect."""

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
    # other requests wait, and are sent on when their time in the queue is over
    sheddable: Annotated[bool, about("true: its requests may be refused; others wait")] = False
    tolerance: Annotated[Tolerance, about("how long users wait gladly: sets the targets not given")] = Tolerance.SECONDS
    ttft_seconds: Annotated[Seconds | None, about("promised time to the first token", default="tolerance")] = None
    inter_token_seconds: Annotated[
        Seconds | None,
        about(
            "promised mean time from one token to the next; given here, a pod where it would be broken is full",
            default="tolerance",
        ),
    ] = None
    queue_seconds: Annotated[SecondsOrZero | None, about("longest wait in the queue", default="tolerance")] = None
    attainment: Annotated[
        Objective | None,
        about(
            "share of its requests that are to be within the targets: alerts go by it", default="0.99; 0.9 if sheddable"
        ),
    ] = None
    queue_requests: Annotated[CountOrZero, about("requests of the class that may wait in one replica")] = 1000
    wait_from_zero_seconds: Annotated[
        SecondsOrZero | None,
        about(
            "longest wait for the first pod of a pool that was scaled to zero; 0: refused at once",
            default="the pool's, which is the most",
        ),
    ] = None
    reserved_share: Annotated[
        Share, about("share of the tokens sent while it has requests waiting, whatever has a higher priority")
    ] = 0.0
    ceiling: Annotated[RealShare, about("share of a pod's limits that its requests may fill")] = 1.0
    order: Annotated[Order, about("which of a tenant's waiting requests goes first")] = Order.SHORTEST_WORK
    refusal_status: Annotated[
        Literal[429, 503] | None,
        about("HTTP status of refusals", default="503; 429 if sheddable, with --sheddable-429"),
    ] = None
    degrade: Annotated[
        tuple[DegradationStep, ...],
        Meta(max_length=16),
        about("what is taken from the class before it is refused", default="none"),
    ] = ()

    @property
    def objective(self) -> float:
        """The share of its requests that are to be within all targets."""
        if self.attainment is not None:
            return self.attainment
        return SHEDDABLE_OBJECTIVE if self.sheddable else USUAL_OBJECTIVE

    @property
    def targets(self) -> Targets:
        """What it is promised, its own fields before the tolerance's."""
        default = TARGETS[self.tolerance]
        return Targets(
            ttft_seconds=default.ttft_seconds if self.ttft_seconds is None else self.ttft_seconds,
            inter_token_seconds=(
                default.inter_token_seconds if self.inter_token_seconds is None else self.inter_token_seconds
            ),
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
    """Requests that match all that is given here belong to `priority_class`; the first rule that matches counts."""

    conditions = (
        Rule(
            cel=" || ".join(f"(has(self.{name}) && size(self.{name}) > 0)" for name in _CONDITIONS),
            message="matches every request: give headers, pathPrefix, models or claims, or set defaultClass",
            holds=lambda rule: any(rule.get(name) for name in _CONDITIONS),
        ),
    )

    priority_class: Annotated[ClassName, about("the class of requests that match all of this")]
    headers: Annotated[
        Mapping[
            Annotated[HeaderName, about("in lower case, as Envoy has it")],
            Annotated[Value, about('exactly this, or "*" for any')],
        ],
        Meta(max_length=16),
        about(
            "headers that the request has",
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
            "models as clients write them",
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
            Annotated[Name, about("of the verified JWT; a.b is b within a")],
            Annotated[Value, about('exactly this or one of a list, or "*" for any')],
        ],
        Meta(max_length=16),
        about("claims of the JWT that Envoy has verified", entry=("name", "value")),
    ] = {}
    trust_objective: Annotated[
        bool | None, about("true: the objective of these requests may raise them", default="as the policy")
    ] = None


_LIMITS = ("requestsPerMinute", "promptTokensPerMinute", "generatedTokensPerMinute", "concurrentRequests")


class Quota(Section, frozen=True, kw_only=True):
    """What one tenant may use of one model; None: no limit. The first quota that matches counts."""

    conditions = (
        Rule(
            cel=" || ".join(f"has(self.{name})" for name in _LIMITS),
            message=f"limits nothing: give {', '.join(_LIMITS[:-1])} or {_LIMITS[-1]}",
            holds=lambda quota: any(name in quota for name in _LIMITS),
        ),
    )

    tenant: Annotated[Name, about('a tenant, or "*": each by itself')] = ANY
    model: Annotated[Name, about('a model, or "*": each by itself')] = ANY
    requests_per_minute: Annotated[AMinute | None, about("requests sent on")] = None
    prompt_tokens_per_minute: Annotated[AMinute | None, about("tokens of their prompts, cached or not")] = None
    generated_tokens_per_minute: Annotated[AMinute | None, about("tokens of their answers")] = None
    concurrent_requests: Annotated[CountOrZero | None, about("requests that are open at a time")] = None
    burst_seconds: Annotated[Seconds, about("this many seconds' worth may come at once")] = 10.0


class OverloadPolicy(Section, frozen=True, kw_only=True):
    """When endpoints count as full, what waits, and what is refused."""

    conditions = (at_most("leastRetrySeconds", "mostRetrySeconds"),)

    enabled: Annotated[bool, about("false: every request is sent on at once, whatever its class")] = True
    # an endpoint is full from any of the next three on; `ceiling` of a class scales all of them
    waiting_requests: Annotated[Count, about("a pod is full from this many waiting requests on")] = 1
    kv_usage: Annotated[RealShare, about("or from this share of its cache blocks in use on")] = 0.95
    backlog_seconds: Annotated[Seconds, about("or from this much prompt left to compute on")] = 0.2
    unknown_requests: Annotated[Count, about("requests open at a time at a pod that has not reported lately")] = 2
    full_seconds: Annotated[
        Seconds, about("a pod counts as full for this long after a 503 of its own, unless it says how long")
    ] = 1.0
    slow_start_seconds: Annotated[SecondsOrZero, about("time in which a new pod's limits rise to the full ones")] = 10.0
    queue_requests: Annotated[CountOrZero, about("requests of all classes that may wait in one replica")] = 4000
    # after so long in the queue, or AGE_SHARE of its longest wait, a request goes before all shorter work of its tenant
    age_seconds: Annotated[SecondsOrZero, about("after this long a request precedes its tenant's shorter work")] = 15.0
    quantum_tokens: Annotated[Tokens, about("uncached tokens that each tenant in turn may send")] = 2048
    shed_leave: Annotated[RealShare, about("refusing ends when the estimate is below this share of the target")] = 0.8
    least_retry_seconds: Annotated[Seconds, about("lower bound of Retry-After")] = 1.0
    most_retry_seconds: Annotated[Seconds, about("upper bound of Retry-After")] = 60.0
    retry_jitter: Annotated[Share, about("up to this share is added to Retry-After by chance")] = 0.5


FAIRNESS_HEADER = "x-gateway-inference-fairness-id"  # clients set it themselves


class Tenants(Section, frozen=True, kw_only=True):
    """How a request's tenant is known."""

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
        about('header that names the tenant; "": none', default=f"{FAIRNESS_HEADER}, or none with a claim"),
    ] = None
    claim: Annotated[
        str,
        Meta(max_length=256),
        about("claim of the verified JWT that names the tenant, before the header", default="none"),
    ] = ""


class Priorities(Section, frozen=True, kw_only=True):
    """Who belongs to which class and tenant, and what each class may expect."""

    classes: Annotated[
        Mapping[Annotated[ClassName, about("header x-kvmesh-priority and a metric's label")], PriorityClass],
        Meta(max_length=64),
        about(
            "merged by name and field by field with the three default ones and with wider policies' classes",
            default=", ".join(DEFAULT_CLASSES),
            entry=("name", ""),
        ),
    ] = msgspec.field(default_factory=lambda: DEFAULT_CLASSES)
    default_class: Annotated[ClassName, about("the class of requests that nothing puts elsewhere")] = STANDARD
    rules: Annotated[tuple[ClassRule, ...], Meta(max_length=128), about("the first that matches sets the class")] = ()
    objectives: Annotated[
        Mapping[
            Annotated[ObjectiveName, about("as in x-gateway-inference-objective")],
            Annotated[ClassName, about("the class that it means")],
        ],
        Meta(max_length=256),
        about(
            "names of objectives and the class that each means, before InferenceObjectives of the pool",
            entry=("name", "priorityClass"),
        ),
    ] = {}
    trust_objective: Annotated[bool, about("false: the header may lower a request only")] = False
    tenants: Annotated[Tenants, about("how a request's tenant is known")] = Tenants()
    engine_priority: Annotated[
        bool, about("true: pods run vLLM with --scheduling-policy priority and are sent the class's")
    ] = False


PRIORITIES = Priorities()


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityPolicy:
    """Who belongs to which class and tenant, and what each may use: what a picker goes by.

    Made from the sections of a policy by `policy.merged_policy`; the sections say what each field means.
    """

    classes: Mapping[str, PriorityClass] = field(default_factory=lambda: DEFAULT_CLASSES)
    default_class: str = PRIORITIES.default_class
    rules: tuple[ClassRule, ...] = ()
    objectives: Mapping[str, str] = field(default_factory=dict)  # InferenceObjective -> class
    trust_objective: bool = PRIORITIES.trust_objective
    tenant_header: str | None = PRIORITIES.tenants.header  # lowercase; "": none; None: see `header_of_tenant`
    tenant_claim: str = PRIORITIES.tenants.claim
    quotas: tuple[Quota, ...] = ()
    engine_priority: bool = PRIORITIES.engine_priority
    overload: OverloadPolicy = field(default_factory=OverloadPolicy)
    shadow: bool = False  # what the load and quotas would do is only counted and shown

    @property
    def holds_back(self) -> bool:
        """Whether requests wait for room, and are refused where there is none in time."""
        return self.overload.enabled and not self.shadow

    @property
    def header_of_tenant(self) -> str:
        """The header that names the tenant where no claim does, "" for none.

        Where a claim names the tenant, a client must not become another tenant by leaving the token out: a header
        beside it counts only if the policy names it.
        """
        if self.tenant_header is not None:
            return self.tenant_header
        return "" if self.tenant_claim else FAIRNESS_HEADER

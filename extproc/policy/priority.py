"""Priority classes, quotas and what happens under load, as the operator declares them. Values only.

Part of `policy.values`, read from a file by `policy.document`; `docs/priorities.md` explains each field. Seconds,
tokens and shares (0..1) throughout. A higher priority is more important, as in InferenceObjective.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


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
    queue_seconds: float  # longest wait in the picker's queue


# by tolerance; the queue's limits stay below what HTTP clients wait for (the openai SDK: 600 s)
TARGETS: Mapping[Tolerance, Targets] = MappingProxyType(
    {
        Tolerance.MILLISECONDS: Targets(ttft_seconds=0.5, inter_token_seconds=0.05, queue_seconds=2.0),
        Tolerance.SECONDS: Targets(ttft_seconds=5.0, inter_token_seconds=0.1, queue_seconds=30.0),
        Tolerance.MINUTES: Targets(ttft_seconds=60.0, inter_token_seconds=0.5, queue_seconds=120.0),
        Tolerance.HOURS: Targets(ttft_seconds=1800.0, inter_token_seconds=5.0, queue_seconds=300.0),
    }
)


class Order(StrEnum):
    """Which of one tenant's waiting requests goes first."""

    SHORTEST_WORK = "shortest-work"  # fewest uncached tokens, but nobody waits longer than the age bound
    FIRST_COME = "first-come"


class StepKind(StrEnum):
    """What is taken from a class before it is refused."""

    CAP_OUTPUT = "cap-output"  # max_tokens at most `tokens`, also where the request names none
    LIMIT_PROMPT = "limit-prompt"  # prompts of more than `tokens` are refused with 413
    SMALLER_MODEL = "smaller-model"  # `model` in place of the one asked for
    NO_REMOTE_PREFILL = "no-remote-prefill"  # a prefiller that the request names is not used
    REJECT = "reject"


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradationStep:
    """One step, taken from the pressure `enter` on until it is below `leave`.

    Pressure is the TTFT that a newcomer of the class must expect now as a share of the class's target, or the time a
    token at the quickest endpoint as a share of its target where that is more.
    """

    step: StepKind
    enter: float
    leave: float
    least_seconds: float = 5.0  # that it lasts once entered
    tokens: int = 0  # with cap-output and limit-prompt
    model: str = ""  # with smaller-model


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityClass:
    """What requests of one class may expect."""

    priority: int = 0
    sheddable: bool = False  # may be refused; others wait, and are sent on when their time in the queue is over
    tolerance: Tolerance = Tolerance.SECONDS
    ttft_seconds: float | None = None  # None here and below: as the tolerance has it
    inter_token_seconds: float | None = None
    queue_seconds: float | None = None
    queue_requests: int = 1000  # of the class, waiting in one replica
    reserved_share: float = 0.0  # of the tokens dispatched while it has requests waiting, whatever is above it
    ceiling: float = 1.0  # share of an endpoint's limits up to which its requests may fill it
    order: Order = Order.SHORTEST_WORK
    refusal_status: int = 503  # or 429
    degrade: tuple[DegradationStep, ...] = ()

    @property
    def targets(self) -> Targets:
        """What it is promised, its own fields before the tolerance's."""
        usual = TARGETS[self.tolerance]
        return Targets(
            ttft_seconds=usual.ttft_seconds if self.ttft_seconds is None else self.ttft_seconds,
            inter_token_seconds=(
                usual.inter_token_seconds if self.inter_token_seconds is None else self.inter_token_seconds
            ),
            queue_seconds=usual.queue_seconds if self.queue_seconds is None else self.queue_seconds,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRule:
    """Requests that match all that is given here belong to `priority_class`; the first rule that matches counts."""

    priority_class: str
    headers: Mapping[str, str] = field(default_factory=dict)  # lowercase name -> exact value, "*" for any
    path_prefix: str = ""
    models: tuple[str, ...] = ()  # as the client writes them
    claims: Mapping[str, str] = field(default_factory=dict)  # of the JWT that Envoy has verified; "a.b" goes deeper
    trust_objective: bool | None = None  # for these requests; None: as the policy has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one tenant may use of one model; None: no limit. The first quota that matches counts."""

    tenant: str = "*"  # each tenant by itself
    model: str = "*"  # each model by itself
    requests_per_minute: float | None = None
    prompt_tokens_per_minute: float | None = None
    generated_tokens_per_minute: float | None = None
    concurrent_requests: int | None = None
    burst_seconds: float = 10.0  # so many seconds' worth may come at once


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadPolicy:
    """When endpoints count as full, what waits, and what is refused."""

    enabled: bool = True  # False: every request is sent on at once, classes or not
    # an endpoint is full from any of these on; `ceiling` of a class scales all of them
    waiting_requests: int = 1  # that it reports, with what was sent since
    kv_usage: float = 0.95  # share of its cache blocks in use
    backlog_seconds: float = 0.2  # of prompts sent there that it still has to compute
    unknown_requests: int = 2  # open at one time at an endpoint without a recent report
    full_seconds: float = 1.0  # that an endpoint counts as full after a 503 of its own, unless it says how long
    slow_start_seconds: float = 10.0  # in which a new endpoint's limits rise to the full ones
    queue_requests: int = 4000  # of all classes, waiting in one replica
    # after so long in the queue, or AGE_SHARE of its longest wait, a request goes before all shorter work of its tenant
    age_seconds: float = 15.0
    quantum_tokens: int = 2048  # uncached tokens that each tenant in turn may send
    shed_leave: float = 0.8  # refusing ends when the estimate is below this share of the target
    least_retry_seconds: float = 1.0  # bounds of Retry-After
    most_retry_seconds: float = 60.0
    retry_jitter: float = 0.5  # up to this share is added by chance


FAIRNESS_HEADER = "x-gateway-inference-fairness-id"  # clients set it themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityPolicy:
    """Who belongs to which class and tenant, and what each may use."""

    classes: Mapping[str, PriorityClass] = field(default_factory=lambda: DEFAULT_CLASSES)
    default_class: str = STANDARD
    rules: tuple[ClassRule, ...] = ()
    # x-gateway-inference-objective: the name of an objective, or of a class
    objectives: Mapping[str, str] = field(default_factory=dict)  # InferenceObjective -> class
    trust_objective: bool = False  # False: the header may lower a request's priority and never raise it
    tenant_header: str | None = None  # lowercase; "": none; None: FAIRNESS_HEADER unless there is a tenant_claim
    tenant_claim: str = ""  # of the verified JWT, before the header
    quotas: tuple[Quota, ...] = ()
    engine_priority: bool = False  # pods run with --scheduling-policy priority: the class goes into `priority`
    overload: OverloadPolicy = field(default_factory=OverloadPolicy)

    @property
    def header_of_tenant(self) -> str:
        """The header that names the tenant where no claim does, "" for none.

        Whoever has a claim for it must not become somebody by leaving the token out: such a header is named expressly.
        """
        if self.tenant_header is not None:
            return self.tenant_header
        return "" if self.tenant_claim else FAIRNESS_HEADER

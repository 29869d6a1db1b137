"""The fields of `spec.priorities` and `spec.quotas`; part of `policy_fields`."""

from collections.abc import Mapping
from typing import Any

from extproc.policy.bounds import REAL_SHARE, SECONDS, SECONDS_OR_NONE, SHARE
from extproc.policy.field_kinds import Choice, Flag, ListOf, Number, Property, Record, Rule, Text
from extproc.policy.priority import Order, StepKind, Tolerance
from extproc.policy.priority_document import ANY, OWN_HEADERS, REFUSAL_STATUSES

CLASS_NAME = Text(
    most=63,
    pattern=r"^[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$",
    words="a class's name: letters, digits, '-', '_' and '.'",
)
OBJECTIVE_NAME = Text(
    most=253, pattern=CLASS_NAME.pattern, words="an objective's name: letters, digits, '-', '_' and '.'"
)
HEADER_NAME = r"^:?[-!#$%&'*+.^_`|~0-9a-z]+$"  # RFC 9110, 5.6.2; Envoy's own begin with a colon
MODEL = Text(most=256)
A_MINUTE = Number(most=1e15)
LIMITS = ("requestsPerMinute", "promptTokensPerMinute", "generatedTokensPerMinute", "concurrentRequests")
MOST_PRIORITY = 2**31 - 1  # InferenceObjective's and vLLM's: 32 bits
NEED_TOKENS = (StepKind.CAP_OUTPUT, StepKind.LIMIT_PROMPT)
OWN = tuple(OWN_HEADERS)


def _any_of(*names: str) -> str:
    return " || ".join(f"(has(self.{name}) && size(self.{name}) > 0)" for name in names)


STEP = Record(
    properties={
        "step": Property(kind=Choice(of=tuple(StepKind)), required=True, words="what is taken from the class"),
        "enter": Property(
            kind=Number(above=0.0, most=1e6),
            required=True,
            words="from this pressure on: expected time as a share of the target",
        ),
        "leave": Property(kind=Number(above=0.0, most=1e6), required=True, words="until it is below this one"),
        "leastSeconds": Property(kind=SECONDS_OR_NONE, default=5, usual="5", words="that it lasts once entered"),
        "tokens": Property(
            kind=Number(least=1, most=1_000_000_000, whole=True), words="the limit of cap-output and limit-prompt"
        ),
        "model": Property(kind=MODEL, words="what answers with smaller-model"),
    },
    rules=(
        Rule(
            cel="self.leave < self.enter",
            message="leave must be below enter",
            holds=lambda step: step["leave"] < step["enter"],
            at="leave",
        ),
        Rule(
            cel="(self.step in ['cap-output', 'limit-prompt']) == has(self.tokens)",
            message="cap-output and limit-prompt need tokens, the other steps have none",
            holds=lambda step: (step["step"] in NEED_TOKENS) == ("tokens" in step),
            at="step",
        ),
        Rule(
            cel="(self.step == 'smaller-model') == has(self.model)",
            message="smaller-model needs a model, the other steps have none",
            holds=lambda step: (step["step"] == StepKind.SMALLER_MODEL) == ("model" in step),
            at="step",
        ),
    ),
)


def _may_be_refused(given: Mapping[str, Any]) -> bool:
    if given.get("sheddable") is not False:
        return True
    return all(step["step"] != StepKind.REJECT for step in given.get("degrade", ()))


CLASS = Record(
    properties={
        "name": Property(kind=CLASS_NAME, required=True, words="header x-kvmesh-priority and a metric's label"),
        "priority": Property(
            kind=Number(least=-MOST_PRIORITY - 1, most=MOST_PRIORITY, whole=True),
            usual="0",
            words="higher goes first, strictly",
        ),
        "sheddable": Property(kind=Flag(), usual="false", words="may be refused; others wait"),
        "tolerance": Property(
            kind=Choice(of=tuple(Tolerance)),
            usual=Tolerance.SECONDS,
            words="how long users wait gladly: sets the targets",
        ),
        "ttftSeconds": Property(kind=SECONDS, usual="tolerance", words="promised time to the first token"),
        "interTokenSeconds": Property(kind=SECONDS, usual="tolerance", words="promised time a token"),
        "queueSeconds": Property(kind=SECONDS_OR_NONE, usual="tolerance", words="longest wait in the picker's queue"),
        "queueRequests": Property(
            kind=Number(most=1_000_000, whole=True), usual="1000", words="of the class, waiting in one replica"
        ),
        "reservedShare": Property(
            kind=SHARE, usual="0", words="of the tokens sent while it has requests waiting, whatever goes before it"
        ),
        "ceiling": Property(kind=REAL_SHARE, usual="1", words="share of a pod's limits that its requests may fill"),
        "order": Property(
            kind=Choice(of=tuple(Order)),
            usual=Order.SHORTEST_WORK,
            words="which of a tenant's waiting requests goes first",
        ),
        "refusalStatus": Property(kind=Choice(of=REFUSAL_STATUSES), usual="503", words="HTTP status of refusals"),
        "degrade": Property(kind=ListOf(item=STEP, most=16), usual="none", words="what is taken before it is refused"),
    },
    rules=(
        Rule(
            cel="!has(self.sheddable) || self.sheddable || !has(self.degrade)"
            " || self.degrade.all(s, s.step != 'reject')",
            message="only sheddable classes may be refused: a reject step needs sheddable: true",
            holds=_may_be_refused,
            at="degrade",
        ),
    ),
)

RULE_HEADER = Record(
    properties={
        "name": Property(
            kind=Text(most=128, pattern=HEADER_NAME, words="a header's name in lower case"),
            required=True,
            words="in lower case, as Envoy has it",
        ),
        "value": Property(kind=Text(most=1024), required=True, words='exactly this, or "*" for any'),
    },
    rules=(
        Rule(
            cel=f"!(self.name in [{', '.join(repr(name) for name in OWN)}])",
            message=f"the picker reads {', '.join(OWN)} itself: use objectives or pathPrefix",
            holds=lambda header: header["name"] not in OWN,
            at="name",
        ),
    ),
)
RULE_CLAIM = Record(
    properties={
        "name": Property(kind=Text(most=256), required=True, words="of the verified JWT; a.b is b within a"),
        "value": Property(kind=Text(most=1024), required=True, words='exactly this or one of a list, or "*" for any'),
    }
)

CLASS_RULE = Record(
    properties={
        "priorityClass": Property(kind=CLASS_NAME, required=True, words="the class of requests that match all of this"),
        "headers": Property(
            kind=ListOf(item=RULE_HEADER, most=16, keys=("name",), as_mapping=True, value="value"),
            words="headers that the request has",
        ),
        "pathPrefix": Property(
            kind=Text(most=1024, pattern=r"^/[^?]*$", words="a path that starts with '/' and has no '?'"),
            words="beginning of the path",
        ),
        "models": Property(
            kind=ListOf(
                item=MODEL,
                most=64,
                rules=(
                    Rule(
                        cel="self.all(m, m != '*')",
                        message="'*' is no model's name: leave models out for all of them",
                        holds=lambda models: ANY not in models,
                    ),
                ),
            ),
            words="models as clients write them",
        ),
        "claims": Property(
            kind=ListOf(item=RULE_CLAIM, most=16, keys=("name",), as_mapping=True, value="value"),
            words="claims of the JWT that Envoy has verified",
        ),
        "trustObjective": Property(
            kind=Flag(), usual="as the policy", words="these requests' objective may raise them"
        ),
    },
    rules=(
        Rule(
            cel=f"{_any_of('headers', 'pathPrefix', 'models', 'claims')}",
            message="matches every request: give headers, pathPrefix, models or claims, or set defaultClass",
            holds=lambda rule: any(rule.get(name) for name in ("headers", "pathPrefix", "models", "claims")),
        ),
    ),
)

TENANT_HEADER = Record(
    properties={
        "header": Property(
            kind=Text(
                least=0, most=128, pattern=r"^(:?[-!#$%&'*+.^_`|~0-9a-z]+)?$", words="a header's name in lower case"
            ),
            into=("policy", "priorities", "tenant_header"),
            usual="x-gateway-inference-fairness-id, or none with a claim",
            words='header that names the tenant; "": none',
        ),
        "claim": Property(
            kind=Text(least=0, most=256),
            into=("policy", "priorities", "tenant_claim"),
            usual="none",
            words="claim of the verified JWT that names the tenant, before the header",
        ),
    },
    rules=(
        Rule(
            cel=f"!has(self.header) || !(self.header in [{', '.join(repr(name) for name in OWN)}])",
            message=f"{', '.join(OWN)} name no tenant",
            holds=lambda tenants: tenants.get("header") not in OWN,
            at="header",
        ),
    ),
)

PRIORITIES = Record(
    properties={
        "classes": Property(
            kind=ListOf(item=CLASS, most=64, keys=("name",), as_mapping=True),
            usual="critical, standard, sheddable",
            words="merged by name and field by field with the usual three and with wider policies' classes",
        ),
        "defaultClass": Property(kind=CLASS_NAME, usual="standard", words="of requests that nothing puts elsewhere"),
        "rules": Property(kind=ListOf(item=CLASS_RULE, most=128), words="the first that matches sets the class"),
        "objectives": Property(
            kind=ListOf(
                item=Record(
                    properties={
                        "name": Property(
                            kind=OBJECTIVE_NAME, required=True, words="as in x-gateway-inference-objective"
                        ),
                        "priorityClass": Property(kind=CLASS_NAME, required=True, words="the class that it means"),
                    }
                ),
                most=256,
                keys=("name",),
                as_mapping=True,
                value="priorityClass",
            ),
            words="names of objectives and the class that each means, before InferenceObjectives of the pool",
        ),
        "trustObjective": Property(kind=Flag(), usual="false", words="false: the header may lower a request only"),
        "tenants": Property(kind=TENANT_HEADER, into=("policy", "priorities"), words="how a request's tenant is known"),
        "enginePriority": Property(
            kind=Flag(), usual="false", words="pods run vLLM with --scheduling-policy priority and are sent the class's"
        ),
    }
)

QUOTA = Record(
    properties={
        "tenant": Property(kind=Text(most=256), default=ANY, usual='"*"', words='a tenant, or "*": each by itself'),
        "model": Property(kind=MODEL, default=ANY, usual='"*"', words='a model, or "*": each by itself'),
        "requestsPerMinute": Property(kind=A_MINUTE, words="requests sent on"),
        "promptTokensPerMinute": Property(kind=A_MINUTE, words="tokens of their prompts, cached or not"),
        "generatedTokensPerMinute": Property(kind=A_MINUTE, words="tokens of their answers"),
        "concurrentRequests": Property(kind=Number(most=1_000_000, whole=True), words="open at a time"),
        "burstSeconds": Property(kind=SECONDS, default=10, usual="10", words="so many seconds' worth may come at once"),
    },
    rules=(
        Rule(
            cel=" || ".join(f"has(self.{name})" for name in LIMITS),
            message=f"limits nothing: give {', '.join(LIMITS[:-1])} or {LIMITS[-1]}",
            holds=lambda quota: any(name in quota for name in LIMITS),
        ),
    ),
)
QUOTAS = ListOf(item=QUOTA, most=256)

"""The fields of `spec.load`; part of `policy_fields`."""

from extproc.policy.bounds import (
    AMOUNT,
    COUNT,
    COUNT_OR_NONE,
    POLICY,
    REAL_SHARE,
    SECONDS,
    SECONDS_OR_NONE,
    SHARE,
    at_most,
)
from extproc.policy.field_kinds import Flag, Number, Property, Record

OVERLOAD = Record(
    properties={
        "enabled": Property(
            kind=Flag(), usual="true", words="false: every request is sent on at once, whatever its class"
        ),
        "waitingRequests": Property(
            kind=COUNT, usual="1", words="a pod is full from so many waiting requests on (a class's ceiling scales it)"
        ),
        "kvUsage": Property(kind=REAL_SHARE, usual="0.95", words="or from this share of its cache blocks in use on"),
        "backlogSeconds": Property(kind=SECONDS, usual="0.2", words="or from so much prompt left to compute on"),
        "unknownRequests": Property(
            kind=COUNT, usual="2", words="open at a time at a pod that has not reported lately"
        ),
        "fullSeconds": Property(kind=SECONDS, usual="1", words="a pod counts as full after a 503 of its own"),
        "slowStartSeconds": Property(
            kind=SECONDS_OR_NONE, usual="10", words="in which a new pod's limits rise to the full ones"
        ),
        "queueRequests": Property(
            kind=COUNT_OR_NONE, usual="4000", words="of all classes, waiting in one replica of the picker"
        ),
        "ageSeconds": Property(
            kind=SECONDS_OR_NONE, usual="15", words="after so long a request goes before its tenant's shorter work"
        ),
        "quantumTokens": Property(
            kind=Number(least=1, most=1_000_000_000, whole=True),
            usual="2048",
            words="uncached tokens that each tenant in turn may send",
        ),
        "shedLeave": Property(
            kind=REAL_SHARE, usual="0.8", words="refusing ends below this share of the target that was not met"
        ),
        "leastRetrySeconds": Property(kind=SECONDS, usual="1", words="lower bound of Retry-After"),
        "mostRetrySeconds": Property(kind=SECONDS, usual="60", words="upper bound of Retry-After"),
        "retryJitter": Property(kind=SHARE, usual="0.5", words="up to this share is added to it by chance"),
    },
    rules=(at_most("leastRetrySeconds", "mostRetrySeconds"),),
)

HEALTH = Record(
    properties={
        "failureShare": Property(kind=REAL_SHARE, usual="0.5", words="of a pod's requests in the window that failed"),
        "leastRequests": Property(kind=COUNT_OR_NONE, usual="5", words="in the window; fewer prove nothing"),
        "windowSeconds": Property(kind=SECONDS, usual="10", words="the window"),
        "avoidSeconds": Property(kind=SECONDS, usual="5", words="the pod is avoided; doubled each time in a row"),
        "longestAvoidSeconds": Property(kind=SECONDS, usual="60", words="and at most so long"),
        "slowFactor": Property(
            kind=Number(above=0.0, most=1e6),
            usual="3",
            words="so many times the pods' median inter-token time is an outlier",
        ),
        "slowFloorSeconds": Property(kind=SECONDS_OR_NONE, usual="0.05", words="a time below it never is"),
        "mostAvoidedShare": Property(kind=REAL_SHARE, usual="0.5", words="of the pods; more bad ones: none is avoided"),
    },
    rules=(at_most("avoidSeconds", "longestAvoidSeconds"),),
)

LOAD = Record(
    properties={
        "staleAfterSeconds": Property(kind=SECONDS, usual="2", words="a pod's report older than this says nothing"),
        "prefillTokensPerSecond": Property(
            kind=AMOUNT, usual="8000", words="how fast a pod computes prompts, until its reports have shown it"
        ),
        "overload": Property(
            kind=OVERLOAD,
            into=(*POLICY, "priorities", "overload"),
            words="when pods count as full, what waits, what is refused",
        ),
        "health": Property(kind=HEALTH, into=(*POLICY, "health"), words="when a pod is avoided though it reports"),
    }
)

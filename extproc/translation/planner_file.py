"""The planner file of "AI Systems Performance Engineering", chapter 17: `split_policy`, `qos`, `disaggregated_router`.

No system reads these keys, and the book leaves units open: the notes state the assumed ones. Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from extproc.policy.reading import PolicyDocumentError, nearest, read_value
from extproc.policy.schema import Choice, Flag, Kind, Number
from extproc.translation.translation import AMOUNT, COUNT, NAME, SHARE, Note, Translation, records

# requests that are worth one point of these scorers (`choosing.scorers`)
QUEUE_REQUESTS, ACTIVE_REQUESTS = 4, 8
PERCENT = Number(least=1, most=100, above=True, whole=False)  # 1 and less would be a share
ROLE: Mapping[str, Kind] = {"name": Choice(of=("prefill_worker", "decode_worker")), "instance_count": COUNT}
METRICS = {"prefill_length": "prefill-length", "prefill_queue_depth": "prefill-queue"}
ACTIONS = {"prefer_remote": "prefer-remote", "prefer_local": "prefer-local"}
VOTE: Mapping[str, Kind] = {
    "metric": Choice(of=tuple(METRICS)),
    "action": Choice(of=tuple(ACTIONS)),
    **dict.fromkeys(("threshold", "weight"), AMOUNT),
}


class Row(NamedTuple):
    """A key of the file."""

    kind: Kind
    field: str = ""  # its field; "" without a counterpart
    difference: str = ""
    factor: float = 0  # 0: the value as it is


ROUTER = "disaggregated_router.enable"
THRESHOLDS = {"disaggregation.enabled": True, "disaggregation.rule": "thresholds"}
SHEDDABLE = "priorities.classes[sheddable]"
PER_REQUEST = "the cost of one request more than at the idlest pod, up to {}"
NO_GPU_SIGNAL = "no signal: the forecast of prompts and answers replaces it"
SCALED = {
    "min_replicas": Row(COUNT, "minReplicas"),
    "max_replicas": Row(COUNT, "maxReplicas"),
    "scale_up.queue_length": Row(AMOUNT, "scaleUp.queueRequests", "the forecast may ask for more pods before"),
    "scale_up.kv_cache_usage": Row(PERCENT, "scaleUp.kvUsage", factor=0.01),
    "scale_up.gpu_utilization": Row(PERCENT, "", NO_GPU_SIGNAL),
    "scale_down.queue_length": Row(AMOUNT, "scaleDown.queueRequests"),
    "scale_down.kv_cache_usage": Row(PERCENT, "scaleDown.kvUsage", factor=0.01),
    "scale_down.gpu_utilization": Row(PERCENT, "", NO_GPU_SIGNAL),
}
WEIGHTS = {
    "split_policy.prefix_cache_weight": Row(AMOUNT, "prefix", "the worth of a whole cached prompt"),
    "split_policy.queue_length_weight": Row(AMOUNT, "queue-depth", PER_REQUEST.format(4), QUEUE_REQUESTS),
    "split_policy.decode_load_weight": Row(AMOUNT, "active-requests", PER_REQUEST.format(8), ACTIVE_REQUESTS),
}
ROWS: Mapping[str, Row] = {
    "model": Row(NAME, "", "a policy is for pools, not for models: name the pool in `targetRefs`"),
    "split_policy.prompt_length_threshold": Row(
        COUNT, "disaggregation.promptTokens", "the rule's limits of queues and busy pods are defaults"
    ),
    **{key: row._replace(field=f"scoring.weights.{row.field}") for key, row in WEIGHTS.items()},
    "split_policy.enable_hotspot_prevention": Row(Flag(), "prefixCache.copyHotPrefixes"),
    "cache.reuse_prefix": Row(Flag(), "", "prefixes always count, but with strategy `least-request` or `round-robin`"),
    "cache.min_cache_hit_ratio": Row(SHARE, "prefixCache.alertHitRatio", "an alert; smaller hits count, too"),
    **{
        f"autoscale.{role}.{key}": row._replace(field=row.field and f"autoscale.{role}.{row.field}")
        for role in ("prefill", "decode")
        for key, row in SCALED.items()
    },
    "qos.enable_early_rejection": Row(Flag(), f"{SHEDDABLE}.sheddable", "other classes wait instead"),
    "qos.low_priority_threshold_ms": Row(
        AMOUNT, f"{SHEDDABLE}.ttftSeconds", "low priority: by `priorities.rules` or an InferenceObjective", 0.001
    ),
    "qos.reject_on_slo_violation": Row(Flag(), f"{SHEDDABLE}.sheddable"),
    "qos.reject_on_sloViolation": Row(Flag(), f"{SHEDDABLE}.sheddable", "read as `reject_on_slo_violation`"),
    "roles": Row(records({**ROLE, "model_path": NAME, "gpu_type": NAME}, "name")),
    ROUTER: Row(Flag(), "disaggregation.enabled"),
    "disaggregated_router.policies": Row(records(VOTE, *VOTE), "disaggregation.votes"),
    "disaggregated_router.remote_prefill_min_score": Row(AMOUNT, "disaggregation.minimumScore"),
}


def translate_planner_file(document: Mapping[str, Any]) -> Translation:
    """Translate a file. Raise PolicyDocumentError with the path of the wrong key."""
    given: dict[str, Any] = {}
    for key, value in _leaves(document):
        if key not in ROWS:
            raise PolicyDocumentError(key, f"unknown key{nearest(key, ROWS)}")
        given[key] = read_value(ROWS[key].kind, value, key)
    if ROUTER not in given and any(key.startswith("disaggregated_router") for key in given):
        raise PolicyDocumentError(ROUTER, "is missing")
    refusals = [key for key in given if ROWS[key].field == f"{SHEDDABLE}.sheddable"]
    given |= dict.fromkeys(refusals, all(given[key] for key in refusals))
    found = Translation()
    if weights := {row.field: given[key] for key, row in WEIGHTS.items() if key in given}:
        found.put_only_weights("split_policy", weights)
    for key, value in given.items():
        _put(found, key, value, given)
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, part in value.items():
        yield from _leaves(part, f"{path}.{name}" if path else name)


def _put(found: Translation, key: str, value: Any, given: Mapping[str, Any]) -> None:
    _, field, difference, factor = ROWS[key]
    match key:
        case "split_policy.prompt_length_threshold" if ROUTER in given:
            found.leave(key, "`disaggregated_router` decides")
        case "split_policy.prompt_length_threshold":
            found.put(key, {**THRESHOLDS, field: value}, difference)
        case _ if key == ROUTER:
            found.put(key, {field: value, **({"disaggregation.rule": "votes"} if value else {})})
        case "disaggregated_router.policies":
            votes = [{**vote, "metric": METRICS[vote["metric"]], "action": ACTIONS[vote["action"]]} for vote in value]
            found.put(key, {field: votes})
        case "roles":
            for place, each in enumerate(value):
                _put_role(found, f"roles[{place}]", each, given)
        case _ if field:
            found.put(key, {field: round(value * factor, 9) if factor else value}, difference)
        case _ if value is True:
            found.notes.append(Note(key, ("always",)))
        case _:
            found.leave(key, difference)


def _put_role(found: Translation, key: str, given: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    scaled = f"autoscale.{given['name'].removesuffix('_worker')}"
    for name, value in given.items():
        if name == "instance_count" and f"{scaled}.min_replicas" not in others:
            found.put(f"{key}.{name}", {f"{scaled}.minReplicas": value})
        elif name != "name":
            found.leave(f"{key}.{name}", f"in the pods' Deployment; bounds and GPU types also in `{scaled}`")

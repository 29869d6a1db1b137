"""EndpointPickerConfig of llm-d and the inference extension: its plugins, and the weights of its profiles. Pure."""

from collections.abc import Mapping
from typing import Any

from extproc.policy.reading import PolicyDocumentError, nearest, read_record
from extproc.policy.schema import Choice, Kind, ListOf, Record
from extproc.translation.translation import AMOUNT, COUNT, NAME, Note, Translation, record, records

Fields = Mapping[str, Any]
SECTIONS = ("flowControl", "dataLayer", "requestHandler", "saturationDetector", "parser")
OPEN = Record(properties={}, is_open=True)
FILE = record(
    {
        "apiVersion": Choice(of=("llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")),
        "kind": NAME,
        "featureGates": ListOf(item=NAME, least=0, most=64),
        "plugins": records({"name": NAME, "type": NAME, "parameters": OPEN}, "type"),
        "schedulingProfiles": records(
            {"name": NAME, "plugins": records({"pluginRef": NAME, "weight": AMOUNT}, "pluginRef")}, "name", "plugins"
        ),
        **dict.fromkeys(SECTIONS, OPEN),
    },
    "apiVersion",
)
PARAMETERS: Mapping[str, Kind] = {"nonCachedTokens": COUNT, "deciders": OPEN, "deciderPluginName": NAME}
PER_REQUESTS = "{} requests more cost the whole weight, fewer a part of it"
# type of plugin -> scorer, difference
SCORERS: Mapping[str, tuple[str, str]] = {
    "prefix-cache-scorer": ("prefix", ""),
    "precise-prefix-cache-scorer": ("prefix", ""),
    "queue-scorer": ("queue-depth", PER_REQUESTS.format(4)),
    "running-requests-size-scorer": ("active-requests", PER_REQUESTS.format(8)),
    "active-request-scorer": ("active-requests", PER_REQUESTS.format(8)),
    "kv-cache-utilization-scorer": ("kv-usage", "counts this prompt, too"),
    "token-load-scorer": ("prefill-work", "16,384 tokens more cost the whole weight, there 4,194,304"),
    "no-hit-lru-scorer": ("cache-room", "the cache in which the prompt displaces least, also after partial hits"),
    "lora-affinity-scorer": ("lora", ""),
    "session-affinity-scorer": ("session", "sessions by `x-session-id`"),
}
# behaviour without a field, what to do instead, plugins and sections
COUNTERPARTS: tuple[tuple[str, ...], ...] = (
    ("filter `role`, by the same labels", "", "decode-filter", "prefill-filter"),
    ("best score, ties at random, `scoring.fallbacks`", "", "max-score-picker"),
    ("prefixes by `kvmesh indexer`", "", "approx-prefix-cache-producer", "precise-prefix-cache-producer"),
    ("tokens from the pods, or `models.served[].tokenizer`", "", "token-producer", "tokenizer"),
    ("bookings of all pickers", "", "inflight-load-producer"),
    ("a pick and its headers", "", "single-profile-handler", "disagg-headers-handler", "prefill-header-handler"),
    ("pods and their models", "", "endpoint-notification-source", "models-data-source", "models-data-extractor"),
    ("reports of the pods", "", "dataLayer", "metrics-data-source", "core-metrics-extractor"),
    ("APIs by path", "", "requestHandler", "parser", "openai-parser", "anthropic-parser", "passthrough-parser"),
    ("tenants in turn", "", "round-robin-fairness-policy"),
    ("`waitingRequests` and `kvUsage` of `load.overload`", "", "utilization-detector", "saturationDetector"),
    ("", "no effect outside of the profile that picks", *SCORERS),
    ("", "write `load.overload` and `priorities.classes`; queues are on by default", "flowControl"),
    ("", "`scoring.weights.prefill-work` compares a hit with the queue, in tokens", "prefix-cache-affinity-filter"),
    ("", "`scoring.weights.queue-depth`", "load-aware-scorer"),
    ("", "`scoring.weights.session` prefers the session's pod", "session-affinity-filter"),
    ("", "a pool of these pods, or the route's subset", "label-selector-filter", "by-label-selector"),
    ("", "TTFT is estimated without training", "latency-scorer", "predicted-latency-producer"),
    ("", "limits of pods: `load.overload`", "utilization-filter", "concurrency-detector"),
    ("", "pods are filtered by `max_model_len`", "context-length-aware"),
    ("", "`links`, `sameLabels` of `disaggregation`", "topology-affinity-scorer", "disaggregatedset-rollout-screener"),
    ("", "only ties are random", "random-picker", "weighted-random-picker"),
    ("", "`priorities.classes[].ceiling`", "priority-holdback-policy"),
    ("", "`priorities.classes[].sheddable`", "probabilistic-admitter", "latency-slo-admitter"),
    ("", "tenants in turn", "global-strict-fairness-policy", "program-aware-fairness"),
    ("", "least work first within a tenant", "fcfs-ordering-policy", "slo-deadline-ordering-policy"),
    ("", "an endpoint for each of the pool's `targetPorts`", "data-parallel-profile-handler"),
)
WORDS = {name: ((same,) if same else (), instead) for same, instead, *names in COUNTERPARTS for name in names}
UNKNOWN = ((), "no counterpart is known; a scorer of your own package can be one")


def translate_endpoint_picker_config(document: Mapping[str, Any]) -> Translation:
    """Translate a file. Raise PolicyDocumentError with the path of the wrong field."""
    given = read_record(FILE, document, "")
    plugins: dict[str, tuple[str, Fields]] = {}  # name -> type, parameters
    for place, each in enumerate(given.get("plugins", ())):
        name = each.get("name", each["type"])
        if name in plugins:
            raise PolicyDocumentError(f"plugins[{place}]", f"{name!r} is already the name of a plugin")
        plugins[name] = (each["type"], document["plugins"][place].get("parameters") or {})
    found = Translation()
    weights = _put_profiles(found, given, {name: kind for name, (kind, _) in plugins.items()})
    for name in sorted(plugins, key=lambda each: "decider" in plugins[each][0]):  # what handlers enable, they restrict
        _put_plugin(found, f"plugins[{name}]", *plugins[name], weights=weights)
    found.notes += [Note(f"featureGates[{each}]", *WORDS.get(each, UNKNOWN)) for each in given.get("featureGates", ())]
    found.notes += [Note(section, *WORDS[section]) for section in SECTIONS if section in given]
    return found


def _put_profiles(found: Translation, given: Fields, types: Mapping[str, str]) -> Mapping[str, float]:
    """Return scorer -> weight of the profile that picks the pod for a client's request."""
    profiles = given.get("schedulingProfiles") or [{"name": "default", "plugins": [{"pluginRef": p} for p in types]}]
    names = [profile["name"] for profile in profiles]
    picking = next((name for name in ("decode", "default") if name in names), names[0])
    weights: dict[str, float] = {}
    for place, profile in enumerate(profiles):
        for number, each in enumerate(profile["plugins"]):
            name = each["pluginRef"]
            if name not in types:
                path = f"schedulingProfiles[{place}].plugins[{number}].pluginRef"
                raise PolicyDocumentError(path, f"{name!r} is no plugin of this file{nearest(name, types)}")
            if profile["name"] == picking and types[name] in SCORERS:
                scorer, _ = SCORERS[types[name]]
                weights[scorer] = weights.get(scorer, 0) + each.get("weight", 1)
        key = f"schedulingProfiles[{profile['name']}]"
        if profile["name"] != picking:
            found.leave(key, "prefill pods are compared by expected TTFT; other pools get their own policies")
        elif weights:
            found.put_only_weights(key, weights)
        else:
            found.leave(key, "none of its scorers has a counterpart: the default `kv-aware` picks")
    return weights


def _put_plugin(found: Translation, key: str, kind: str, parameters: Fields, *, weights: Mapping[str, float]) -> None:
    given = read_record(record(PARAMETERS, is_open=True), parameters, f"{key}.parameters")
    fields, difference = _fields(kind, given, weights)
    if fields:
        found.put(key, fields, difference)
    else:
        found.notes.append(Note(key, *WORDS.get(kind, UNKNOWN)))
    if unread := [name for name in parameters if not fields or name not in PARAMETERS]:
        found.leave(f"{key}.parameters", f"not read: {', '.join(unread)}")


def _fields(kind: str, given: Fields, weights: Mapping[str, float]) -> tuple[Fields, str]:
    """Return the fields for a plugin, and the difference."""
    match kind:
        case _ if kind in SCORERS:
            scorer, difference = SCORERS[kind]
            return ({f"scoring.weights.{scorer}": weights[scorer]} if scorer in weights else {}), difference
        case "disagg-profile-handler" | "pd-profile-handler":
            fields = {"disaggregation.enabled": True, "disaggregation.protocol": "sidecar"}
            return fields, "protocol `nixl` works without sidecars"
        case "always-disagg-pd-decider":
            return {"disaggregation.rule": "always"}, ""
        case "prefix-based-pd-decider" if tokens := given.get("nonCachedTokens"):
            limits = dict.fromkeys(("disaggregation.promptTokens", "disaggregation.busyPromptTokens"), tokens)
            difference = "local if `prefillQueueRequests` 10 wait; the default rule `estimate` compares TTFTs"
            return {"disaggregation.rule": "thresholds", **limits}, difference
        case "prefix-based-pd-decider":
            return {"disaggregation.enabled": False}, "never remote without `nonCachedTokens`"
    return {}, ""

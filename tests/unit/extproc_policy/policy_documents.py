"""InferencePolicy documents for tests: one that uses every field, small ones, and how to find a path in one."""

import copy
import re
from collections.abc import Mapping
from typing import Any

import yaml

WHOLE: Mapping[str, Any] = yaml.safe_load("""
apiVersion: kvmesh.io/v1alpha1
kind: InferencePolicy
metadata: {name: chat, namespace: prod, generation: 3, creationTimestamp: "2026-01-31T12:00:00Z"}
spec:
  targetRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: llama}]
  hosts: [llama.example.com, "*.llm.example.com"]
  profile: conversation
  scoring:
    strategy: prefix-aware
    weights:
      {prefill-work: 3, decode-work: 1, prefix: 2, recent-prefix: 0.5, queue-depth: 1, active-requests: 1, kv-usage: 1,
       cache-room: 1, lora: 1, session: 1, memory-bandwidth: 1, turn: 0}
    fallbacks: 1
    sessionSeconds: 60
  prefixCache:
    alertHitRatio: 0.5
    tierWeights: {GPU: 1, CPU: 0.7, CPU_TIER1: 0.7, CPU_TIER2: 0.5, STORAGE: 0.4, FS: 0.4, OBJ: 0.3}
    recentSeconds: 3
    copyHotPrefixes: false
  load:
    staleAfterSeconds: 3
    prefillTokensPerSecond: 5000
    overload:
      {enabled: true, waitingRequests: 2, kvUsage: 0.9, backlogSeconds: 0.3,
       slowStartSeconds: 5, queueRequests: 100}
    health: {failureShare: 0.4, avoidSeconds: 4}
  priorities:
    classes:
    - name: batch
      priority: -50
      sheddable: true
      tolerance: hours
      targets: mlperf-llama3.1-405b
      ttftSeconds: 100
      interTokenSeconds: 1
      queueSeconds: 60
      queueRequests: 50
      reservedShare: 0.1
      ceiling: 0.5
      refusalStatus: 429
      degrade:
      - {step: cap-output, tokens: 500, enter: 0.7, leave: 0.5, leastSeconds: 3}
      - {step: smaller-model, model: small, enter: 1.5, leave: 1}
      - {step: reject, enter: 3, leave: 2}
    - {name: standard, ttftSeconds: 2}
    defaultClass: standard
    rules:
    - priorityClass: batch
      headers: [{name: x-team, value: nightly}]
      pathPrefix: /v1/chat
      models: [org/llama, fast]
      claims: [{name: org.plan, value: "*"}]
      trustObjective: true
    - {priorityClass: critical, headers: [{name: x-team, value: on-call}]}
    objectives: [{name: nightly, priorityClass: batch}]
    trustObjective: false
    tenants: {header: x-tenant, claim: sub}
    enginePriority: true
  quotas:
  - {tenant: nightly, requestsPerMinute: 60, promptTokensPerMinute: 600000, generatedTokensPerMinute: 30000,
     concurrentRequests: 20, burstSeconds: 60}
  - {model: org/llama, requestsPerMinute: 600}
  disaggregation: {enabled: true, promptTokens: 300, busyPromptTokens: 70, busyDecodes: 9, prefillQueueRequests: 11,
                   raceShare: 0.05, raceTtftSeconds: 0.5}
  autoscale:
    both: {minReplicas: 1, maxReplicas: 4, scaleUp: {kvUsage: 0.9}, scaleDown: {kvUsage: 0.3}}
    prefill:
      {minReplicas: 4, maxReplicas: 12, scaleUp: {queueRequests: 8, kvUsage: 0.8},
       scaleDown: {queueRequests: 2, kvUsage: 0.4}}
    decode:
      minReplicas: 8
      maxReplicas: 24
      scaleUp: {queueRequests: 16}
      scaleDown: {queueRequests: 4}
      variants:
      - {name: h100, selector: [{name: gpu, value: h100}], podHourPrice: 4.5, minReplicas: 1, maxReplicas: 8,
         startSeconds: 120, prefillTokensPerSecond: 9000, decodeTokensPerSecond: 3000}
      - {name: l40s, selector: [{name: gpu, value: l40s}], podHourPrice: 1.5}
  models:
    onlyListed: true
    served:
    - name: org/llama
      aliases: [llama]
      adapters: [sql-lora]
      tokens: tokenizer
      tokenizer: /models/llama
      chatTemplate: /models/llama.jinja
      chatTemplateKwargs: [{name: enable_thinking, value: "false"}, {name: effort, value: high}]
      maxModelLen: 8192
    - {name: small}
    rules:
    - {model: fast, targets: [{model: org/llama, weight: 9}, {model: small}], stickyBy: header, stickyHeader: x-tenant,
       fallbacks: [small]}
  failureMode: FailOpen
  observability: {sampleShare: 0.1}
""")

SMALL: tuple[Mapping[str, Any], ...] = (
    {"scoring": {"strategy": "least-request"}},
    {"priorities": {"classes": [{"name": "chat", "priority": 3}], "defaultClass": "chat"}},
    {"quotas": [{"concurrentRequests": 0}]},
    {"targetRefs": [{"group": "", "kind": "Service", "name": "vllm"}], "hosts": ["a.b"]},
    {
        "targetRefs": [{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": "r"}],
        "failureMode": "FailClose",
    },
    {},
)


def policy(spec: Mapping[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    """A document with this spec; without one, with every field there is."""
    document = copy.deepcopy(dict(WHOLE))
    if spec is not None:
        document["spec"] = copy.deepcopy(dict(spec))
    document["metadata"] |= metadata
    return document


PART = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|\[(\"(?:[^\"\\]|\\.)*\")\]")


def path_exists(document: object, path: str) -> bool:
    """Whether the path of an error leads somewhere; of a missing field, its parent must."""
    at, end = document, 0
    while end < len(path):
        match = PART.match(path, end)
        if match is None:
            return False
        end = match.end()
        name, index, quoted = match.groups()
        if isinstance(at, Mapping):
            key = name if name is not None else quoted
            if quoted is not None:
                return any(isinstance(known, str) for known in at)
            if key not in at:
                return end == len(path)
            at = at[key]
        elif isinstance(at, list) and index is not None and int(index) < len(at):
            at = at[int(index)]
        else:
            return end == len(path) and not isinstance(at, list)
    return True

"""What is accepted and hardly meant is said: it sheds everything, matches nothing, is not acted on."""

from typing import Any

import pytest

from extproc.policy.inference_policy import parse_inference_policy
from extproc.policy.merged_policy import pick_policy
from extproc.reach.warnings import merged_warnings, warnings
from tests.unit.extproc_policy.policy_documents import policy


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, ["spec: sets nothing"]),
        ({"scoring": {"strategy": "round-robin"}}, []),
        (
            {"failureMode": "FailOpen"},
            [
                "spec.failureMode: FailOpen is the running picker's; while none answers, Envoy does what "
                "`kvmesh install --failure-mode` says (`kvmesh doctor` compares the two)"
            ],
        ),
        ({"quotas": [{"requestsPerMinute": 0}]}, ["spec.quotas[0]: a limit of 0 refuses every request"]),
        (
            {"quotas": [{"tenant": "a", "concurrentRequests": 0}]},
            ["spec.quotas[0]: a limit of 0 refuses every request that it is for"],
        ),
        (
            {"priorities": {"classes": [{"name": "sheddable", "ttftSeconds": 0.001}]}},
            ["spec.priorities.classes[sheddable].ttftSeconds: no pod answers within 0.001 s: sheds everything"],
        ),
        (
            {"priorities": {"classes": [{"name": "a", "degrade": [{"step": "reject", "enter": 0.2, "leave": 0.1}]}]}},
            ["spec.priorities.classes[a].degrade[0].enter: refuses from 0.2 of the target on, which is still met"],
        ),
        (
            {"priorities": {"classes": [{"name": "a", "sheddable": True, "queueRequests": 0, "ceiling": 0.01}]}},
            [
                "spec.priorities.classes[a].ceiling: at 0.01 of their limits hardly a pod ever has room",
                "spec.priorities.classes[a].queueRequests: none may wait: everything is shed while no pod has room",
            ],
        ),
        (
            {
                "priorities": {
                    "rules": [
                        {"priorityClass": "a", "pathPrefix": "/v1", "headers": [{"name": "x", "value": "*"}]},
                        {"priorityClass": "a", "pathPrefix": "/v1/chat", "headers": [{"name": "x", "value": "1"}]},
                        {"priorityClass": "a", "pathPrefix": "/v1/chat"},
                    ]
                }
            },
            ["spec.priorities.rules[1]: matches nothing: rules[0] comes first and matches all of it"],
        ),
        (
            {"load": {"overload": {"kvUsage": 0.01}}},
            [
                "spec.load.overload.kvUsage: pods count as full from 0.01 of their cache on: nearly always",
            ],
        ),
        (
            {"disaggregation": {"rule": "votes"}},
            [
                "spec.disaggregation.votes: are none, so that the rule leaves every prompt where it is decoded",
                "spec.disaggregation.enabled: is not true here: the section acts only where another policy says so",
            ],
        ),
        (
            {"models": {"rules": [{"model": "a", "targets": [{"model": "b"}, {"model": "c", "weight": 0}]}]}},
            ["spec.models.rules[0].targets[1].weight: 0 sends it nothing"],
        ),
    ],
)
def test_a_doubtful_policy_is_accepted_with_a_warning(spec: dict[str, Any], words: list[str]) -> None:
    assert warnings(parse_inference_policy(policy(spec))) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, []),
        (
            {"priorities": {"classes": {"gold": {"priority": 7, "reservedShare": 0.1}}}},
            [
                "spec.priorities.classes[gold].reservedShare: reserved for no request: "
                "no rule, objective or default leads here"
            ],
        ),
        (
            {"priorities": {"classes": {"gold": {"priority": 7}}}},
            ["spec.priorities.classes[gold]: no request can get it: no rule, objective or default leads here"],
        ),
        # a client may name a class that lowers it, and any where it is trusted
        ({"priorities": {"classes": {"low": {"priority": -7, "reservedShare": 0.1}}}}, []),
        ({"priorities": {"trustObjective": True, "classes": {"gold": {"priority": 7}}}}, []),
        (
            {
                "disaggregation": {"enabled": True, "rule": "thresholds", "prefillQueueRequests": 10},
                "autoscale": {"prefill": {"scaleUp": {"queueRequests": 10}}},
            },
            [
                "spec.autoscale.prefill.scaleUp.queueRequests: 10 is never reached: from disaggregation's "
                "prefillQueueRequests (10) on no more prompts go there"
            ],
        ),
        (
            {
                "disaggregation": {"enabled": True, "rule": "thresholds", "prefillQueueRequests": 10},
                "autoscale": {"prefill": {"scaleUp": {"queueRequests": 8}}},
            },
            [],
        ),
        (
            {"models": {"onlyListed": True}},
            ["spec.models.onlyListed: no model is listed, every request that names one is answered 404"],
        ),
        (
            {
                "models": {"onlyListed": True, "served": [{"name": "a"}]},
                "quotas": [{"model": "b", "requestsPerMinute": 1}],
                "priorities": {"rules": [{"priorityClass": "sheddable", "models": ["c"]}]},
            },
            [
                "spec.quotas[0].model: matches nothing: 'b' is not listed (onlyListed)",
                "spec.priorities.rules[0].models: match nothing: none is listed (onlyListed)",
            ],
        ),
    ],
)
def test_what_only_the_whole_shows_is_warned_of_for_the_pool(fields: dict[str, Any], words: list[str]) -> None:
    assert merged_warnings(*pick_policy(fields)) == words


@pytest.mark.parametrize(
    ("role", "least", "seconds", "words"),
    [
        ("both", 0, 300, ""),
        ("decode", 0, 0, ""),
        ("both", 0, 301, "301 s are more than gateways wait by default"),
        ("decode", 2, 10, "says nothing: minReplicas is 2"),
        ("prefill", 0, 10, "says nothing: no request waits for the first pod that computes prompts for others"),
    ],
)
def test_a_wait_for_the_first_pod_that_never_comes_or_is_ended_sooner(
    role: str, least: int, seconds: float, words: str
) -> None:
    scaled = {role: {"minReplicas": least, "waitFromZeroSeconds": seconds}}
    found = "".join(merged_warnings(*pick_policy({"autoscale": scaled})))
    assert found.startswith(f"spec.autoscale.{role}.waitFromZeroSeconds: {words}") if words else not found

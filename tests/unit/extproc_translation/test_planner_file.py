"""The planner file of "AI Systems Performance Engineering": what its keys become, and what differs."""

from typing import Any

import pytest

from extproc.choosing import scorers
from extproc.disaggregation.offload import Sides, decide
from extproc.translation import planner_file
from extproc.translation.translated import translated
from kvmesh.documents.document_files import DocumentFileError
from tests.unit.extproc_translation.foreign_policies import notes_of, policy_of, published, spec_of


def test_the_printed_file_becomes_a_policy() -> None:
    weights = {"kv-usage": 0, "prefix": 10.0, "queue-depth": 6.0, "active-requests": 4.0}
    assert spec_of(published("planner")) == {
        "scoring": {"strategy": "prefix-aware", "weights": weights},
        "disaggregation": {"enabled": True, "rule": "thresholds", "promptTokens": 256},
        "prefixCache": {"copyHotPrefixes": True, "alertHitRatio": 0.75},
        "autoscale": {
            "prefill": {
                "minReplicas": 4,
                "maxReplicas": 12,
                "scaleUp": {"queueRequests": 8},
                "scaleDown": {"queueRequests": 2},
            },
            "decode": {
                "minReplicas": 8,
                "maxReplicas": 24,
                "scaleUp": {"queueRequests": 16, "kvUsage": 0.75},
                "scaleDown": {"queueRequests": 4, "kvUsage": 0.3},
            },
        },
        "priorities": {"classes": [{"name": "sheddable", "sheddable": True, "ttftSeconds": 0.5}]},
    }


def test_keys_without_a_counterpart_are_named() -> None:
    left = [key for key, note in notes_of(published("planner")).items() if not note.became]
    signals = [f"autoscale.prefill.{way}.gpu_utilization" for way in ("scale_up", "scale_down")]
    assert left == ["model", *signals]


def test_only_the_files_weights_count() -> None:
    assert policy_of(published("planner")).weights == {"prefix": 10.0, "queue-depth": 6.0, "active-requests": 4.0}


def test_a_weight_is_for_one_request() -> None:
    assert (planner_file.QUEUE_REQUESTS, planner_file.ACTIVE_REQUESTS) == (
        scorers.QUEUE_REQUESTS,
        scorers.ACTIVE_REQUESTS,
    )


@pytest.mark.parametrize(
    ("uncached", "queue", "decodes", "remote"),
    [
        (255, 0, 7, False),
        (256, 9, 0, True),
        (256, 10, 0, False),
        (256, 10, 8, False),
        (64, 0, 8, True),
        (63, 0, 8, False),
    ],
)
def test_the_threshold_splits_prompts_as_the_book_means_it(
    uncached: int, queue: int, decodes: int, remote: bool
) -> None:
    sides = Sides(prompt_tokens=uncached, prefill_queue=queue, decode_requests=decodes)
    assert decide(sides, policy_of(published("planner")).disaggregation).remote is remote


@pytest.mark.parametrize(
    ("tokens", "queue", "remote"),
    [(300, 5, True), (300, 10, True), (300, 11, False), (256, 0, False), (100, 11, False)],
)
def test_votes_decide_and_a_local_vote_subtracts(tokens: int, queue: int, remote: bool) -> None:
    policy = policy_of(published("disaggregated_router")).disaggregation
    assert policy.enabled
    assert decide(Sides(prompt_tokens=tokens, prefill_queue=queue), policy).remote is remote


def test_the_router_outranks_the_threshold_wherever_it_stands() -> None:
    planner, router = published("planner"), published("disaggregated_router")
    for both in ({**planner, **router}, {**router, **planner}):
        assert policy_of(both).disaggregation.rule == "votes"
        assert not notes_of(both)["split_policy.prompt_length_threshold"].became
    assert not policy_of({"disaggregated_router": {"enable": False}, **planner}).disaggregation.enabled


@pytest.mark.parametrize(
    ("qos", "refused"),
    [
        ({"reject_on_sloViolation": True}, True),
        ({"enable_early_rejection": False}, False),
        ({"enable_early_rejection": True, "reject_on_slo_violation": False}, False),
        ({"reject_on_slo_violation": False, "enable_early_rejection": True}, False),
    ],
)
def test_low_priority_is_refused_if_all_switches_are_on(qos: dict[str, bool], refused: bool) -> None:
    assert policy_of({"qos": qos}).priorities.classes["sheddable"].sheddable is refused


def test_roles_are_minimums_unless_autoscale_has_them() -> None:
    roles = [
        {"name": "prefill_worker", "model_path": "models/llm-70b", "instance_count": 4, "gpu_type": "B200"},
        {"name": "decode_worker", "instance_count": 8},
    ]
    given = {"roles": roles, "autoscale": {"decode": {"min_replicas": 6}}}
    assert spec_of(given) == {"autoscale": {"prefill": {"minReplicas": 4}, "decode": {"minReplicas": 6}}}
    left = [key for key, note in notes_of(given).items() if not note.became]
    assert left == ["roles[0].model_path", "roles[0].gpu_type", "roles[1].instance_count"]


def test_a_file_that_ignores_prefixes_differs() -> None:
    notes = notes_of({"qos": {"enable_early_rejection": True}, "cache": {"reuse_prefix": False}})
    assert "least-request" in notes["cache.reuse_prefix"].difference


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"split_policy": {"prompt_length_treshold": 1}},
            "split_policy.prompt_length_treshold: unknown key; the nearest ",
        ),
        ({"qos": {}, "scoring": {"strategy": "kv-aware"}}, "scoring.strategy: unknown key"),
        ({"qos": {"enable_early_rejection": "yes"}}, "qos.enable_early_rejection: must be true or false"),
        (
            {"autoscale": {"decode": {"scale_up": {"kv_cache_usage": 0.75}}}, "qos": {}},
            "autoscale.decode.scale_up.kv_cache_usage: must be above 1 and at most 100, not 0.75",
        ),
        (
            {"autoscale": {"decode": {"scale_up": {"queue_length": 1}, "scale_down": {"queue_length": 1}}}, "qos": {}},
            "autoscale.decode.scale_up.queue_length: scaleUp.queueRequests must be above scaleDown.queueRequests",
        ),
        ({"roles": [{"instance_count": 1}]}, "roles[0].name: is missing"),
        (
            {"disaggregated_router": {"policies": [{"metric": "ttft", "threshold": 1, "action": "", "weight": 1}]}},
            "disaggregated_router.policies[0].metric: must be one of prefill_length, prefill_queue_depth",
        ),
        ({"disaggregated_router": {"remote_prefill_min_score": 0.5}}, "disaggregated_router.enable: is missing"),
        ({"qos": {}, "metadata": 5}, "metadata: must be an object"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_wrong_file_is_refused_with_the_path_of_its_key(value: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentFileError) as refused:
        translated(value, name="theirs")
    assert str(refused.value).startswith(message)

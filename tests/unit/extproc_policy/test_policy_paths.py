"""Fields of the picker's documents have the names that people write, in origins, conditions and messages."""

import pytest

from extproc.policy.inference_policy import parse_inference_policy, spec_path
from tests.unit.extproc_policy.policy_documents import path_exists, policy


@pytest.mark.parametrize(
    ("path", "written"),
    [
        (("policy", "strategy"), "spec.scoring.strategy"),
        (("policy", "weights", "prefill-work"), "spec.scoring.weights.prefill-work"),
        (("policy", "recent_prefix_seconds"), "spec.prefixCache.recentSeconds"),
        (("policy", "tier_weights", "CPU_TIER1"), "spec.prefixCache.tierWeights.CPU_TIER1"),
        (("policy", "hotspot"), "spec.prefixCache.hotspot"),
        (("policy", "priorities", "overload", "kv_usage"), "spec.load.overload.kvUsage"),
        (("policy", "health", "slow_factor"), "spec.load.health.slowFactor"),
        (("policy", "priorities", "classes", "chat", "ttft_seconds"), "spec.priorities.classes[chat].ttftSeconds"),
        (("policy", "priorities", "classes", "chat"), "spec.priorities.classes[chat]"),
        (("policy", "priorities", "objectives", "nightly"), "spec.priorities.objectives[nightly]"),
        (("policy", "priorities", "rules"), "spec.priorities.rules"),
        (("policy", "priorities", "tenant_claim"), "spec.priorities.tenants.claim"),
        (("policy", "priorities", "quotas"), "spec.quotas"),
        (("policy", "autoscale", "decode", "scale_up", "kv_usage"), "spec.autoscale.decode.scaleUp.kvUsage"),
        (("policy",), "spec"),
        (("models", "only_listed"), "spec.models.onlyListed"),
        (("sample_share",), "spec.observability.sampleShare"),
        (("policy", "observability", "audit_share"), "spec.observability.auditShare"),
        (("policy", "observability", "gpu_hour_price"), "spec.observability.gpuHourPrice"),
        (("failure_mode",), "spec.failureMode"),
        (("policy", "cordoned"), "spec.cordoned"),  # not a field of the resource: said as it is
    ],
)
def test_a_field_has_its_path_in_the_resource(path: tuple[str, ...], written: str) -> None:
    assert spec_path(path) == written


def test_every_field_that_a_policy_sets_leads_back_to_where_it_was_written() -> None:
    document = policy()
    lists = {"spec.priorities.classes", "spec.priorities.objectives"}
    for path in leaves(parse_inference_policy(document).fields):
        written = spec_path(path)
        assert path_exists(document, written.partition("[")[0]), written
        assert "[" not in written or written.partition("[")[0] in lists


def leaves(fields: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(fields, dict):
        return [path]
    return [leaf for name, part in fields.items() for leaf in leaves(part, (*path, name))]

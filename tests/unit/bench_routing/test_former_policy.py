"""Checkouts from before a policy was an InferencePolicy get what they understand."""

from pathlib import Path

from bench.overload.plan import policy
from bench.routing.former_policy import former_policy
from bench.routing.subject import Subject


def test_each_section_goes_where_it_was() -> None:
    spec = {
        "scoring": {"strategy": "kv-aware", "weights": {"queue-depth": 2}, "scales": {"prefillTokens": 9}},
        "prefixCache": {"recentSeconds": 3, "tierWeights": {"CPU_TIER1": 0.5}},
        "load": {"staleAfterSeconds": 2, "overload": {"kvUsage": 0.9}, "health": {"slowFactor": 2}},
        "priorities": {
            "classes": [{"name": "batch", "ttftSeconds": 3}],
            "objectives": [{"name": "nightly", "priorityClass": "batch"}],
            "rules": [{"priorityClass": "batch", "headers": [{"name": "x-a", "value": "*"}]}],
            "tenants": {"claim": "sub"},
        },
        "quotas": [{"requestsPerMinute": 6}],
        "observability": {"auditShare": 1},
    }
    assert former_policy(spec) == {
        "strategy": "kv-aware",
        "weights": {"queue-depth": 2},
        "scales": {"prefill_tokens": 9},
        "recent_prefix_seconds": 3,
        "tier_weights": {"CPU_TIER1": 0.5},
        "stale_after_seconds": 2,
        "health": {"slow_factor": 2},
        "priorities": {
            "classes": {"batch": {"ttft_seconds": 3}},
            "objectives": {"nightly": "batch"},
            "rules": [{"priority_class": "batch", "headers": {"x-a": "*"}}],
            "tenant_claim": "sub",
            "overload": {"kv_usage": 0.9},
            "quotas": [{"requests_per_minute": 6}],
        },
        "observability": {"audit_share": 1},
    }


def test_only_checkouts_without_this_declaration_get_it(tmp_path: Path) -> None:
    assert Subject().policy_document(policy()) == policy()
    assert Subject(checkout=tmp_path).policy_document(policy()) == former_policy(policy())

"""The policy setting, strictly read: every mistake is named with its path."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.errors import ConfigError
from extproc.pods.endpoint import Role
from extproc.policy.document import parse_policy
from extproc.policy.priority import PriorityPolicy
from extproc.policy.values import PRESETS, HealthPolicy, PickPolicy, Strategy


def test_nothing_given_is_the_default() -> None:
    assert parse_policy({}) == PickPolicy()


def test_every_field_may_be_given() -> None:
    policy = parse_policy(
        {
            "strategy": "prefix-aware",
            "weights": {"prefix": 4, "kv-usage": 0},
            "health": {"slow_factor": 2},
            "priorities": {"default_class": "sheddable"},
            "roles": {"10.0.0.1:8000": "prefill"},
            "cordoned": ["10.0.0.2:8000"],
            "tier_weights": {"CPU": 0.9},
            "fallbacks": 0,
        }
    )
    assert policy == PickPolicy(
        strategy=Strategy.PREFIX_AWARE,
        weights={"prefix": 4.0, "queue-depth": 2.0},
        health=HealthPolicy(slow_factor=2.0),
        priorities=PriorityPolicy(default_class="sheddable"),
        roles={"10.0.0.1:8000": Role.PREFILL},
        cordoned=frozenset({"10.0.0.2:8000"}),
        tier_weights={"CPU": 0.9},
        fallbacks=0,
    )


def test_what_is_not_given_stays_as_below() -> None:
    base = parse_policy({"strategy": "least-request", "stale_after_seconds": 9})
    assert parse_policy({"fallbacks": 1}, base=base) == PickPolicy(
        strategy=Strategy.LEAST_REQUEST, weights=PRESETS[Strategy.LEAST_REQUEST], stale_after_seconds=9.0, fallbacks=1
    )


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1], "policy: must be a mapping"),
        ({"weigts": {}}, "policy.weigts: unknown field; the nearest valid one is 'weights'"),
        ({"weights": {"prefx": 1}}, "policy.weights.prefx: unknown scorer; the nearest valid one is 'prefix'"),
        ({"weights": {"prefix": "much"}}, "policy.weights.prefix: must be a number >= 0, not 'much'"),
        ({"weights": {"prefix": float("nan")}}, "policy.weights.prefix: must be a number >= 0"),
        ({"weights": {"prefix": -1}}, "policy.weights.prefix: must be a number >= 0"),
        ({"strategy": "least-request", "weights": {"active-requests": 0}}, "policy.weights: every weight is 0"),
        ({"strategy": "fastest"}, "policy.strategy: there is no strategy 'fastest'; there are round-robin"),
        ({"health": {"slow": 1}}, "policy.health.slow: unknown field; the nearest valid one is 'slow_factor'"),
        ({"health": 3}, "policy.health: must be a mapping, not 3"),
        ({"health": {"failure_share": 2}}, "policy.health.failure_share: must be between 0 and 1"),
        ({"scales": {"prefill_tokens": 0}}, "policy.scales.prefill_tokens: must be above 0"),
        ({"fallbacks": "two"}, "policy.fallbacks: expected `int`, got `str`"),
        ({"roles": {"a": "cook"}}, "policy.roles.a: must be one of both, prefill, decode"),
        ({"tier_weights": {"CPU": 2}}, "policy.tier_weights.CPU: must be between 0 and 1"),
        ({"tier_weights": {"CPU": "all"}}, "policy.tier_weights.CPU: expected `float`, got `str`"),
        ({"cordoned": ["a", 1]}, "policy.cordoned[1]: expected `str`, got `int`"),
        ({"cordoned": "a"}, "policy.cordoned: expected `array`, got `str`"),
        ({"hotspot": {"enabled": 1}}, "policy.hotspot.enabled: expected `bool`, got `int`"),
        ({1: 2}, "policy: must be a mapping"),
    ],
)
def test_a_mistake_is_named_with_its_path(document: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_policy(document)
    assert str(error.value).startswith(message)


def test_the_page_explains_every_field_and_its_example_can_be_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "policy.md").read_text(encoding="utf-8")
    example = page.partition("```yaml\n")[2].partition("```")[0]
    assert parse_policy(yaml.safe_load(example)["policy"]) == PickPolicy()
    given = yaml.safe_load(example)["policy"]
    assert set(given) == set(PickPolicy.__dataclass_fields__)
    for part in ("scales", "health", "hotspot"):
        assert set(given[part]) == set(getattr(PickPolicy(), part).__dataclass_fields__)

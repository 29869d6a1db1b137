"""The `policy` setting (YAML or JSON, already parsed) -> PickPolicy; strict: an error names the path of what is wrong.

The document's fields are those of `values`; `docs/policy.md` and `docs/priorities.md` explain them. What parts of
`priorities` must have to do with each other is checked by `priority_document`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from extproc.errors import ConfigError
from extproc.policy.document_fields import mapping, numbers, read_over, refuse_unknown
from extproc.policy.priority_document import checked_priorities
from extproc.policy.scale_document import check_autoscale
from extproc.policy.values import PRESETS, SCORER_NAMES, PickPolicy, Strategy

SHARES = frozenset(
    {
        *("failure_share", "most_avoided_share", "tier_weights"),
        *("reserved_share", "ceiling", "kv_usage", "shed_leave", "retry_jitter"),
        *("minimum_hit_ratio", "alert_hit_ratio", "gpu_utilization", "audit_share"),
    }
)
# every other number must be above 0
MAY_BE_ZERO = frozenset(
    {
        *("weights", "tier_weights", "fallbacks", "copies", "pressure", "least_requests"),
        *("recent_prefix_seconds", "unfollowed_prefix_seconds", "slow_floor_seconds", "least_seconds"),
        *("request_tokens", "waiting_tokens", "tokens", "audit_share", "gpu_hour_price"),
        *("minimum_hit_ratio", "alert_hit_ratio", "min_replicas", "gpu_utilization"),
        *("reserved_share", "queue_requests", "queue_seconds", "slow_start_seconds", "age_seconds", "retry_jitter"),
        # of a quota: nothing is allowed
        *("requests_per_minute", "prompt_tokens_per_minute", "generated_tokens_per_minute", "concurrent_requests"),
    }
)
MOST_CURRENCY_LETTERS = 8
# InferenceObjective's and vLLM's: 32 bits
PRIORITY, LEAST_PRIORITY, MOST_PRIORITY = "priority", -(2**31), 2**31 - 1


def parse_policy(document: object, *, path: str = "policy", base: PickPolicy | None = None) -> PickPolicy:
    """Read the setting on top of `base`, field by field.

    `strategy` sets all weights, `weights` then changes single ones. Raise ConfigError with the path, such as
    `policy.weights.prefx`.
    """
    base = base or PickPolicy()
    given = mapping(document, path)
    weights = _weights(given, base, path)
    policy = replace(read_over(given, base, path), weights=weights)
    for where, name, number in numbers(policy, path):
        _check(where, name, number)
    if not policy.weights:
        raise ConfigError(f"{path}.weights: every weight is 0")
    check_autoscale(policy.autoscale, path=f"{path}.autoscale")
    _check_currency(policy.observability.currency, path=f"{path}.observability.currency")
    return replace(policy, priorities=checked_priorities(policy.priorities, path=f"{path}.priorities"))


def _weights(given: Mapping[str, Any], base: PickPolicy, path: str) -> dict[str, float]:
    weights: Mapping[str, float] = base.weights
    if "strategy" in given:
        weights = PRESETS[_strategy(given["strategy"], f"{path}.strategy")]
    changed = mapping(given.get("weights", {}), f"{path}.weights")
    refuse_unknown(changed, SCORER_NAMES, f"{path}.weights", what="scorer")
    for name, weight in changed.items():
        if not _is_number(weight):
            raise ConfigError(f"{path}.weights.{name}: must be a number >= 0, not {weight!r}")
    return {name: float(weight) for name, weight in {**weights, **changed}.items() if weight != 0}


def _strategy(value: object, path: str) -> Strategy:
    try:
        return Strategy(str(value))
    except ValueError:
        raise ConfigError(f"{path}: there is no strategy {value!r}; there are {', '.join(Strategy)}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(where: str, name: str, number: float) -> None:
    if name == PRIORITY:
        if not LEAST_PRIORITY <= number <= MOST_PRIORITY:
            raise ConfigError(f"{where}: must be between {LEAST_PRIORITY} and {MOST_PRIORITY}, not {number!r}")
        return
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{where}: must be a number >= 0, not {number!r}")
    if name in SHARES and number > 1:
        raise ConfigError(f"{where}: must be between 0 and 1, not {number!r}")
    if not number and name not in MAY_BE_ZERO:
        raise ConfigError(f"{where}: must be above 0")


def _check_currency(currency: str, *, path: str) -> None:
    # it becomes a label of metrics and a word on pages
    if not (1 <= len(currency) <= MOST_CURRENCY_LETTERS and currency.isascii() and currency.isalpha()):
        raise ConfigError(f"{path}: must be 1 to {MOST_CURRENCY_LETTERS} letters, not {currency!r}")

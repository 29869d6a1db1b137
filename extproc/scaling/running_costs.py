"""Cost of one role's pods per hour and per million tokens served. Pure."""

from collections.abc import Sequence

from extproc.scaling.demand import Work
from extproc.scaling.seen import Costs, VariantSignal

MILLION, HOUR = 1e6, 3600.0
LEAST_RATE = 1.0  # tokens a second: below it a cost per token is meaningless


def costs_of(variants: Sequence[VariantSignal], work: Work | None) -> Costs:
    """Return the costs of the present pods, and of the tokens they served in the last minutes."""
    priced = [(each.pod_hour_price, each.present) for each in variants if each.present]
    if any(price is None for price, _ in priced) or not variants:
        return Costs()
    hour = sum((price or 0.0) * present for price, present in priced)
    output = 0.0 if work is None else work.served_output_rate
    return Costs(
        per_hour=hour,
        per_million_tokens=per_million(hour, output + (0.0 if work is None else work.served_input_rate)),
        per_million_output_tokens=per_million(hour, output),
    )


def per_million(cost_per_hour: float, tokens_per_second: float) -> float | None:
    """Return the cost of a million tokens, or None with hardly any tokens."""
    return cost_per_hour / HOUR / tokens_per_second * MILLION if tokens_per_second >= LEAST_RATE else None

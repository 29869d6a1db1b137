"""What the pods of one role cost an hour, and a million tokens as served. Pure."""

from collections.abc import Sequence

from extproc.scaling.demand import Work
from extproc.scaling.seen import Costs, VariantSignal

MILLION, HOUR = 1e6, 3600.0
LEAST_RATE = 1.0  # tokens a second: a pool at rest has no cost a token worth a number


def costs_of(variants: Sequence[VariantSignal], work: Work | None) -> Costs:
    """Return the costs of the pods that are there, and of what they have served in the last minutes."""
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
    """Return what a million tokens costs; None: there are hardly any."""
    return cost_per_hour / HOUR / tokens_per_second * MILLION if tokens_per_second >= LEAST_RATE else None

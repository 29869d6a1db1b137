"""Decides when the two best prefill pods race: both compute the prompt, and the first answer wins. Pure.

A race shortens TTFT at the cost of double work. So races have a budget and are only for classes with a tight target.
The second pod must have an empty queue, and be expected to meet the target, too.
"""

from extproc.disaggregation.prefill_plan import PrefillPlan, Race

MOST_SAVED = 8.0  # races; the most that a quiet period can save up
ROUNDING = 1e-9  # error of a sum of shares


class RaceBudget:
    """A pool's race budget: a share of its remote prefills, by exact counting instead of chance."""

    def __init__(self) -> None:
        self._saved = 0.0

    def allows(self, share: float) -> bool:
        """Tell whether the next remote prefill may be raced, given the allowed `share` of them."""
        return self._saved + share >= 1.0 - ROUNDING

    def count(self, plan: PrefillPlan) -> None:
        """Count a remote prefill, and charge the budget if it is raced."""
        self._saved = min(self._saved + plan.policy.race_share, MOST_SAVED)
        if plan.races:
            self._saved -= 1.0


def race_of(plan: PrefillPlan, budget: RaceBudget) -> Race | None:
    """Return whether a plan's prompt is raced, and why; None without races in the policy or without a leg."""
    if not plan.policy.race_share or not plan.is_remote:
        return None
    why_not = _why_not(plan, budget)
    if why_not is not None:
        return Race(runs=False, why=why_not)
    second = plan.places[1]
    return Race(runs=True, why=f"{second.endpoint}, the second best, would take {second.seconds:.3f} s")


def _why_not(plan: PrefillPlan, budget: RaceBudget) -> str | None:
    policy, target = plan.policy, plan.sides.target_seconds
    if target is None or target > policy.race_ttft_seconds:
        promise = "nothing" if target is None else f"{target:g} s"
        return f"its class promises {promise}; races are for {policy.race_ttft_seconds:g} s and less"
    if len(plan.places) < 2:
        return "no second prefill pod may compute it"
    second = plan.places[1]
    if second.queue:
        return f"{second.queue} requests wait at {second.endpoint}, the second best"
    if second.seconds > target:
        return f"{second.endpoint}, the second best, would take {second.seconds:.3f} s, and {target:g} s are promised"
    if not budget.allows(policy.race_share):
        return f"{policy.race_share:g} of the prompts may be raced, and as many were of late"
    return None

"""When the two best prefill pods compute a prompt at the same time, the first of which wins. Pure.

A race buys a sooner first token with work that is done twice. So there is a budget; it is for classes with a tight
target; and the second pod must have nobody waiting, and keep the promise as well as the first.
"""

from extproc.disaggregation.prefill_plan import PrefillPlan, Race

MOST_SAVED = 8.0  # races that a time without any may save up
ROUNDING = 1e-9  # of a sum of shares


class RaceBudget:
    """How many more prompts of a pool may be raced: a share of those that prefill pods compute, counted, not drawn."""

    def __init__(self) -> None:
        self._saved = 0.0

    def allows(self, share: float) -> bool:
        """Tell whether a prompt that goes to prefill pods now may be raced, where this share of all may."""
        return self._saved + share >= 1.0 - ROUNDING

    def count(self, plan: PrefillPlan) -> None:
        """Take note of a prompt that goes to prefill pods, and whether it is raced."""
        self._saved = min(self._saved + plan.policy.race_share, MOST_SAVED)
        if plan.races:
            self._saved -= 1.0


def race_of(plan: PrefillPlan, budget: RaceBudget) -> Race | None:
    """Return whether a plan's prompt is raced, and why; None where the policy wants no races, or there is no leg."""
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

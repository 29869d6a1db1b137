"""What is known of one role of a pool: its demand, forecasts, and the numbers that are wanted. Pure."""

from dataclasses import dataclass, field

from extproc.scaling.day_profile import DayState
from extproc.scaling.demand import RoleDemand, Work
from extproc.scaling.forecast import Forecast
from extproc.scaling.holding import Holding
from extproc.scaling.need import Outlook, Outlooks
from extproc.scaling.seen import PoolSeen
from extproc.scaling.variant_scaling import VariantSet

DAY_WORDS = {
    DayState.KNOWN: "by the time of day",
    DayState.LEARNING: "by the trend alone: fewer than two days were seen at that time of day",
    DayState.CLOCK_JUMPED: "by the trend alone: the time of day has jumped",
}


@dataclass(slots=True, eq=False)
class RoleMemory:
    """What is known of one role."""

    demand: RoleDemand = field(default_factory=RoleDemand)
    prefill: Forecast = field(default_factory=Forecast)
    decode: Forecast = field(default_factory=Forecast)
    holding: Holding = field(default_factory=Holding)  # where there are no variants
    variants: VariantSet = field(default_factory=VariantSet)
    work: Work | None = None  # of the last look that knew it

    def main(self, role: str) -> Forecast:
        """Return the forecast of the work that keeps more pods of the role busy."""
        if role == "both":
            return max(self.prefill, self.decode, key=lambda each: each.level or 0.0)
        return self.prefill if role == "prefill" else self.decode

    def count_in(self, reference: str) -> None:
        """Count work in pods of this variant from now on."""
        if self.demand.reference != reference:  # what was seen was counted in others
            self.demand.reference = reference
            self.prefill.clear()
            self.decode.clear()

    def forget_samples(self) -> None:
        """Begin anew; the number that is wanted stays."""
        self.demand = RoleDemand(reference=self.demand.reference)
        self.prefill.clear()
        self.decode.clear()

    def ahead(self, role: str, seen: PoolSeen, *, seconds: float) -> tuple[Outlooks, str]:
        """Return what there will be to do in a while, which may be less than now, and what says so."""
        ready = sum(pod.serves and pod.role == role for pod in seen.pods)

        def outlook(forecast: Forecast) -> Outlook | None:
            busy = forecast.by_day(seconds, wall=seen.wall)
            busy = forecast.ahead(seconds) if busy is None else busy
            if forecast.level is None or busy is None:
                return None
            return Outlook(
                level=forecast.level,
                busy=busy,
                horizon=seconds,
                alone_seconds=0.0,
                ready=ready,
                ttft_seconds=seen.ttft_seconds,
                inter_token_seconds=seen.inter_token_seconds,
            )

        outlooks = Outlooks(
            prompts=outlook(self.prefill) if role != "decode" else None,
            decoding=outlook(self.decode) if role != "prefill" else None,
        )
        return outlooks, DAY_WORDS[self.main(role).day_state(seconds, wall=seen.wall)]

"""How many pods each role of a pool wants, as `GET /state` shows it. Pure."""

from collections.abc import Sequence

from extproc.pages.decision_state import rounded
from extproc.pages.picker_state import ActedState, ScaleState, VariantState
from extproc.scaling.acting import ActOutcome
from extproc.scaling.seen import Signal, VariantSignal


def scale_state(signal: Signal, acts: Sequence[ActOutcome] = ()) -> ScaleState:
    """Return what is shown of one role; `acts`: what has come of writing for the pool's roles."""
    return ScaleState(
        role=signal.role,
        wanted=signal.wanted,
        told=signal.told,
        ready=signal.ready,
        present=signal.present,
        state=signal.state.value,
        reason=signal.reason,
        shadow=signal.shadow,
        saturation=rounded(signal.saturation),
        prefill_lean=None if signal.prefill_lean is None else round(signal.prefill_lean, 3),
        cost_per_hour=_price(signal.costs.per_hour),
        cost_per_million_tokens=_price(signal.costs.per_million_tokens),
        cost_per_million_output_tokens=_price(signal.costs.per_million_output_tokens),
        time_of_day=signal.time_of_day.value,
        acts=tuple(_acted(each) for each in acts if each.wish.role == signal.role),
        variants=tuple(_variant(each) for each in signal.variants),
    )


def _variant(each: VariantSignal) -> VariantState:
    return VariantState(
        name=each.name,
        wanted=each.wanted,
        told=each.told,
        ready=each.ready,
        present=each.present,
        source=each.source.value,
        prefill_tokens_per_second=rounded(each.prefill_tokens_per_second),
        decode_tokens_per_second=rounded(each.decode_tokens_per_second),
        pod_hour_price=each.pod_hour_price,
    )


def _acted(each: ActOutcome) -> ActedState:
    return ActedState(
        deployment=f"{each.wish.namespace}/{each.wish.deployment}",
        variant=each.wish.variant,
        wanted=each.wish.replicas,
        replicas=each.replicas,
        state=each.state.value,
        words=each.words,
    )


def _price(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

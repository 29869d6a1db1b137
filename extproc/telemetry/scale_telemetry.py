"""How many pods each role of a pool wants, and what that rests on, in the pool's registry."""

from collections.abc import Callable, Mapping

from extproc.scaling.seen import Signal, State
from extproc.telemetry import scale_metrics
from kvmesh.metrics.registry import Reading, Registry


def show_scale(registry: Registry, signals: Callable[[], Mapping[str, Signal]]) -> None:
    """Show, at each scrape, the signals by role; to be called once."""

    def read() -> Reading:
        by_role = signals()
        yield scale_metrics.WANTED_REPLICAS, (((role,), each.wanted) for role, each in by_role.items())
        yield scale_metrics.SCALE_TO_REPLICAS, (((role,), each.told) for role, each in by_role.items())
        yield scale_metrics.READY_REPLICAS, (((role,), each.ready) for role, each in by_role.items())
        yield (
            scale_metrics.SCALE_STATE,
            (((role, state.value), each.state is state) for role, each in by_role.items() for state in State),
        )
        yield (
            scale_metrics.SATURATION,
            (((role,), each.saturation) for role, each in by_role.items() if each.saturation is not None),
        )
        yield (
            scale_metrics.BUSY_PODS,
            (
                ((role, work), busy)
                for role, each in by_role.items()
                for work, busy in (("prefill", each.prefill_busy), ("decode", each.decode_busy))
                if busy is not None
            ),
        )
        yield scale_metrics.QUEUED_TOKENS, (((role,), each.queued_tokens) for role, each in by_role.items())
        yield (
            scale_metrics.TOKEN_RATE,
            (
                ((role, kind), rate)
                for role, each in by_role.items()
                for kind, rate in (
                    ("input", each.input_tokens_per_second),
                    ("cached", each.cached_tokens_per_second),
                    ("output", each.output_tokens_per_second),
                )
            ),
        )
        yield from _variants(by_role)
        yield from _costs(by_role)

    registry.read(read)


def _variants(by_role: Mapping[str, Signal]) -> Reading:
    named = [(role, each) for role, signal in by_role.items() for each in signal.variants if each.name]
    yield scale_metrics.VARIANT_WANTED_REPLICAS, (((role, each.name), each.wanted) for role, each in named)
    yield scale_metrics.VARIANT_SCALE_TO_REPLICAS, (((role, each.name), each.told) for role, each in named)
    yield (
        scale_metrics.POD_CAPACITY,
        (
            ((role, each.name, work), rate)
            for role, signal in by_role.items()
            for each in signal.variants
            for work, rate in (
                ("prefill", each.prefill_tokens_per_second if role != "decode" else None),
                ("decode", each.decode_tokens_per_second if role != "prefill" else None),
            )
            if rate is not None
        ),
    )


def _costs(by_role: Mapping[str, Signal]) -> Reading:
    yield (
        scale_metrics.PODS_COST,
        (((role,), cost) for role, each in by_role.items() if (cost := each.costs.per_hour) is not None),
    )
    yield (
        scale_metrics.TOKENS_COST,
        (
            ((role, tokens), cost)
            for role, each in by_role.items()
            for tokens, cost in (
                ("all", each.costs.per_million_tokens),
                ("output", each.costs.per_million_output_tokens),
            )
            if cost is not None
        ),
    )
    yield (
        scale_metrics.PREFILL_LEAN,
        (((role,), lean) for role, each in by_role.items() if (lean := each.prefill_lean) is not None),
    )

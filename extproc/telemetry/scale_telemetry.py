"""How many pods each role of a pool wants, and what that rests on, in the pool's registry."""

from collections.abc import Callable, Mapping

from extproc.scaling.seen import Signal, State
from extproc.telemetry import metrics
from kvmesh.metrics.registry import Reading, Registry


def show_scale(registry: Registry, signals: Callable[[], Mapping[str, Signal]]) -> None:
    """Show, at each scrape, the signals by role; to be called once."""

    def read() -> Reading:
        by_role = signals()
        yield metrics.WANTED_REPLICAS, (((role,), each.wanted) for role, each in by_role.items())
        yield metrics.SCALE_TO_REPLICAS, (((role,), each.told) for role, each in by_role.items())
        yield metrics.READY_REPLICAS, (((role,), each.ready) for role, each in by_role.items())
        yield (
            metrics.SCALE_STATE,
            (((role, state.value), each.state is state) for role, each in by_role.items() for state in State),
        )
        yield (
            metrics.SATURATION,
            (((role,), each.saturation) for role, each in by_role.items() if each.saturation is not None),
        )
        yield (
            metrics.BUSY_PODS,
            (
                ((role, work), busy)
                for role, each in by_role.items()
                for work, busy in (("prefill", each.prefill_busy), ("decode", each.decode_busy))
                if busy is not None
            ),
        )
        yield metrics.QUEUED_TOKENS, (((role,), each.queued_tokens) for role, each in by_role.items())
        yield (
            metrics.TOKEN_RATE,
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

    registry.read(read)

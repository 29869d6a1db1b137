"""Requests that wait for a pool's first pod, in the pool's registry."""

from collections.abc import Callable, Mapping

from extproc.admission.waiting_bodies import WaitingBodies
from extproc.telemetry import metrics
from kvmesh.metrics.registry import Registry


class FirstPodTelemetry:
    """Implements `admission.first_pod.FirstPodTelemetry`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._ended = registry.values(metrics.FIRST_POD_WAITS)
        self._seconds = registry.histograms(metrics.FIRST_POD_SECONDS)

    def show(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        """Show, at each scrape, how many of each class wait; to be called once."""
        self._registry.read(
            lambda: [(metrics.FIRST_POD_WAITING, (((name,), count) for name, count in waiting().items()))]
        )

    def ended(self, class_name: str, *, outcome: str, seconds: float) -> None:
        """Count a request that waits no longer."""
        self._ended.of(class_name, outcome).value += 1
        self._seconds.of(class_name).observe(seconds)


def show_waiting_bodies(registry: Registry, bodies: WaitingBodies) -> None:
    """Show what requests of the process hold that wait for first pods."""
    registry.read(
        lambda: (
            (metrics.WAITING_BODY_BYTES, [((), bodies.held_bytes)]),
            (metrics.WAITING_BODIES_GAVE_WAY, [((), bodies.gave_way)]),
        )
    )

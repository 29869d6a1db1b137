"""What clients will say and when: made by `workloads`, played by `load`, judged by `summary`.

Plain values that cross a process boundary as JSON.
"""

from enum import StrEnum

import msgspec

from operate.load.script import Session

POD_MISSING = "pod-missing"  # the load of a bad pod's workloads, on the other pods alone
TURN_SECONDS = 3.0  # after a pod has turned bad, from which on goodput counts


class Way(StrEnum):
    """How a bad pod fails: at once, so that it has nothing to do and looks best. The values name the workloads."""

    REFUSES = "pod-refuses"
    BREAKS_OFF = "pod-breaks-off"


class BadPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod fails every new request from a moment on."""

    pod: int
    at: float  # seconds after the start of the run
    way: Way


class PodRestart(msgspec.Struct, frozen=True, kw_only=True):
    """A pod is killed and comes back empty."""

    pod: int
    at: float  # seconds after the start of the run
    back_after: float  # seconds


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """All that happens in one run; requests due before `measured_from` only warm the caches up."""

    name: str
    title: str
    sessions: tuple[Session, ...]
    measured_from: float  # seconds
    routers: int = 1  # replicas of the router
    restarts: tuple[PodRestart, ...] = ()
    bad_pod: BadPod | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the load generator is told."""

    gateways: tuple[tuple[str, int], ...]  # taken in turn
    model: str
    sessions: tuple[Session, ...]
    request_seconds: float

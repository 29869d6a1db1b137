"""What clients will say and when: made by `workloads`, played by `load`, judged by `summary`.

Plain values that cross a process boundary as JSON.
"""

import msgspec

from extproc.load.script import Session


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


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the load generator is told."""

    gateways: tuple[tuple[str, int], ...]  # taken in turn
    model: str
    sessions: tuple[Session, ...]
    request_seconds: float

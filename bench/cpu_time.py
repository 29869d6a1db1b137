"""CPU time of other processes in nanosecond resolution: the clock that clock_getcpuclockid(3) names.

`/proc/<pid>/stat` counts ticks of 10 ms, which is too coarse for a round of some fifty requests.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SCHEDULER_CLOCK = 2  # CPUCLOCK_SCHED in the kernel's posix-timers.h: all threads, also those that have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """CPU milliseconds since the start of each process, and when that was read (monotonic seconds)."""

    at: float
    cpu_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSpent:
    """CPU milliseconds of each process between two readings, and the seconds between them."""

    seconds: float
    cpu_ms: Mapping[str, float]

    def per_second(self) -> dict[str, float]:
        """CPU milliseconds a second of wall time."""
        return {name: value / self.seconds for name, value in self.cpu_ms.items()}


def process_cpu_ms(pid: int) -> float:
    """What the process has used since its start."""
    return time.clock_gettime_ns((~pid << 3) | SCHEDULER_CLOCK) / 1e6


def read_cpu(pids: Mapping[str, int]) -> CpuReading:
    """Read all processes now; processes of one group, as `pod-0` and `pod-1`, are summed up as `pods`."""
    cpu_ms: dict[str, float] = {}
    for name, pid in pids.items():
        group = "pods" if name.startswith("pod-") else name
        cpu_ms[group] = cpu_ms.get(group, 0.0) + process_cpu_ms(pid)
    return CpuReading(at=time.monotonic(), cpu_ms=cpu_ms)


def spent_between(before: CpuReading, after: CpuReading) -> CpuSpent:
    """The difference of two readings of the same processes."""
    return CpuSpent(
        seconds=after.at - before.at,
        cpu_ms={name: value - before.cpu_ms[name] for name, value in after.cpu_ms.items()},
    )


def machine_ticks() -> tuple[int, int]:
    """All ticks of all cores, and those that the hypervisor gave to others (proc(5), `/proc/stat`)."""
    first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, idle, iowait, irq, softirq, steal = (int(field) for field in first_line.split()[1:9])
    return user + nice + system + idle + iowait + irq + softirq + steal, steal

"""CPU time of processes, from `/proc/<pid>/stat` (proc(5): fields 14 and 15, clock ticks of all threads)."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """CPU milliseconds since the start of each process, and when that was read (monotonic seconds)."""

    at: float
    cpu_ms: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class CpuSum:
    """CPU milliseconds and seconds summed over several intervals."""

    seconds: float
    cpu_ms: dict[str, float]

    @classmethod
    def zero(cls) -> "CpuSum":
        """Nothing measured yet."""
        return cls(seconds=0.0, cpu_ms={})

    def add(self, before: CpuReading, after: CpuReading) -> None:
        """Add the interval between two readings."""
        self.seconds += after.at - before.at
        for name, value in after.cpu_ms.items():
            self.cpu_ms[name] = self.cpu_ms.get(name, 0.0) + value - before.cpu_ms[name]

    def per_second(self) -> dict[str, float]:
        """CPU milliseconds a second of wall time."""
        return {name: value / self.seconds for name, value in self.cpu_ms.items()}


def read_cpu(pids: Mapping[str, int]) -> CpuReading:
    """Read all processes now; processes of one group, as `pod-0` and `pod-1`, are summed up as `pods`."""
    cpu_ms: dict[str, float] = {}
    for name, pid in pids.items():
        group = "pods" if name.startswith("pod-") else name
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        cpu_ms[group] = cpu_ms.get(group, 0.0) + (int(fields[11]) + int(fields[12])) * TICK_MS
    return CpuReading(at=time.monotonic(), cpu_ms=cpu_ms)

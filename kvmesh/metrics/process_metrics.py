"""A process's metrics about itself: CPU, memory, files, garbage collections, and its version.

Names and meanings as in Prometheus' own client libraries:
https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics
"""

import gc
import os
import platform
import resource
from math import inf
from pathlib import Path

from kvmesh import release
from kvmesh.metrics.metric import BUILD, counter, gauge
from kvmesh.metrics.registry import Reading, Registry

VIRTUAL_MEMORY = gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.")
RESIDENT_MEMORY = gauge("process_resident_memory_bytes", "Resident memory size in bytes.")
START_TIME = gauge("process_start_time_seconds", "Start time of the process since unix epoch in seconds.")
CPU = counter("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.")
OPEN_FILES = gauge("process_open_fds", "Number of open file descriptors.")
MOST_OPEN_FILES = gauge("process_max_fds", "Maximum number of open file descriptors.")
COLLECTED = counter("python_gc_objects_collected_total", "Objects collected during gc", "generation")
UNCOLLECTABLE = counter("python_gc_objects_uncollectable_total", "Uncollectable objects found during GC", "generation")
COLLECTIONS = counter("python_gc_collections_total", "Number of times this generation was collected", "generation")


def show_process(registry: Registry, *, process: str) -> None:
    """Show this process in the registry; `process` is its role in kvmesh."""
    build = (BUILD, [((process, platform.python_version(), release()), 1.0)])
    registry.read(lambda: (build, *_process(), *_collector()))


def _process() -> Reading:
    """Read /proc (https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html); return nothing without one."""
    try:
        booted_at = next(
            float(line[6:]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime ")
        )
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()  # the name before may contain spaces
        open_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number
    except (OSError, StopIteration):
        return ()
    ticks, most = os.sysconf("SC_CLK_TCK"), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    values = {
        VIRTUAL_MEMORY: float(fields[20]),
        RESIDENT_MEMORY: float(fields[21]) * resource.getpagesize(),
        START_TIME: float(fields[19]) / ticks + booted_at,
        CPU: float(fields[11]) / ticks + float(fields[12]) / ticks,
        OPEN_FILES: open_files,
        MOST_OPEN_FILES: inf if most == resource.RLIM_INFINITY else most,
    }
    return [(metric, [((), value)]) for metric, value in values.items()]


def _collector() -> Reading:
    stats = [((str(generation),), each) for generation, each in enumerate(gc.get_stats())]
    return [
        (metric, [(labels, each[name]) for labels, each in stats])
        for metric, name in ((COLLECTED, "collected"), (UNCOLLECTABLE, "uncollectable"), (COLLECTIONS, "collections"))
    ]

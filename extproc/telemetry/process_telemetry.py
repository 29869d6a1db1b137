"""What every process tells of itself: CPU, memory, files, garbage collections, its version, and whether it is ready.

One registry for the process, whatever it serves; the pages of metrics put it at their end.
"""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, GCCollector, Info, ProcessCollector, generate_latest

UNKNOWN_VERSION = "unknown"  # a checkout that was never installed
READY = """# HELP kvmesh_ready 1 while traffic may come, 0 before the start is done and while stopping.
# TYPE kvmesh_ready gauge
kvmesh_ready {}
"""


@cache
def process_registry() -> CollectorRegistry:
    """Return the registry; collectors that this platform does not have are left out by the library."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    Info("kvmesh_build", "Which release this process is.", registry=registry).info(
        {"version": _version(), "python": platform.python_version(), "process": "picker"}
    )
    return registry


def process_exposition(*, ready: bool | None = None) -> bytes:
    """Return the process's own lines; `ready` None: nobody knows."""
    text = generate_latest(process_registry())
    return text if ready is None else text + READY.format(int(ready)).encode()


def _version() -> str:
    try:
        return version("kvmesh")
    except PackageNotFoundError:
        return UNKNOWN_VERSION

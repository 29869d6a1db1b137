"""What the process tells of itself beside its work: CPU, memory, files, garbage collections, its version.

Added to a registry by `telemetry`; collectors that a platform does not have are left out by the library.
"""

import platform
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, GCCollector, Info, ProcessCollector

UNKNOWN_VERSION = "unknown"  # a checkout that was never installed


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Show the process there."""
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    Info("kvmesh_build", "Which release this process is.", registry=registry).info(
        {"version": _version(), "python": platform.python_version(), "process": "indexer"}
    )


def _version() -> str:
    try:
        return version("kvmesh")
    except PackageNotFoundError:
        return UNKNOWN_VERSION

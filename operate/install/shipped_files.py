"""Reads the files shipped with the package: CRDs, dashboards, recording rules and alerts.

They are in `manifests/crds` and `manifests/monitoring`; an installed package has copies.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from extproc.errors import ConfigError

HERE = Path(__file__).resolve().parent
PLACES = (HERE / "manifests", HERE.parents[1] / "manifests")
CRDS = ("kvmesh.io_inferencepolicies.yaml",)
# uids; never change them
DASHBOARDS = ("kvmesh-overview", "kvmesh-cache", "kvmesh-priorities", "kvmesh-prefill", "kvmesh-pod")


def read_crds() -> list[dict[str, Any]]:
    """Return the parsed CRDs. Raise ConfigError if a file is missing."""
    return [yaml.safe_load(_text(f"crds/{name}")) for name in CRDS]


@cache
def read_dashboards() -> dict[str, dict[str, Any]]:
    """Return Grafana dashboards by uid. Raise ConfigError if a file is missing."""
    return {uid: json.loads(_text(f"monitoring/grafana/dashboards/{uid}.json")) for uid in DASHBOARDS}


@cache
def read_rules() -> dict[str, Any]:
    """Return recording rules and alerts, as a Prometheus rules file and the spec of a PrometheusRule.

    Raise ConfigError if the file is missing.
    """
    rules: dict[str, Any] = yaml.safe_load(_text("monitoring/prometheus/kvmesh.rules.yaml"))
    return rules


def _text(name: str) -> str:
    for place in PLACES:
        if (place / name).is_file():
            return (place / name).read_text(encoding="utf-8")
    raise ConfigError(f"the file {name} is missing from this installation of kvmesh; install it again")

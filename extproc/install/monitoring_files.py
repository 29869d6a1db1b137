"""The folder `manifests/monitoring`, for a Prometheus and a Grafana without operator and sidecar; a test keeps it true.

`python -m extproc.install.monitoring_files manifests/monitoring` writes it. Pure but for that.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from extproc.install.dashboards.all_dashboards import DASHBOARDS
from extproc.install.dashboards.grafana_json import grafana_json
from extproc.install.plan import INDEXER, PICKER
from extproc.install.rule_groups import rule_groups
from extproc.install.write_tree import write_tree

HEADER = (
    "# Made by `python -m extproc.install.monitoring_files manifests/monitoring`: change extproc/install, not this.\n"
)
RULES_FILE = "prometheus/kvmesh.rules.yaml"


def monitoring_files() -> dict[str, str]:
    """Return the files by their path in the folder."""
    files = {
        f"grafana/dashboards/{dashboard.uid}.json": json.dumps(grafana_json(dashboard), ensure_ascii=False, indent=1)
        + "\n"
        for dashboard in DASHBOARDS
    }
    return files | {
        "grafana/provisioning/dashboards/kvmesh.yaml": _yaml(_dashboard_provider()),
        "grafana/provisioning/datasources/kvmesh.yaml": _yaml(_data_sources()),
        "prometheus/prometheus.yaml": _yaml(_prometheus()),
        RULES_FILE: _yaml(rule_groups()),
    }


def _dashboard_provider() -> dict[str, Any]:
    provider = {
        "name": "kvmesh",
        "folder": "kvmesh",
        "type": "file",
        "disableDeletion": True,
        "options": {"path": "/var/lib/grafana/dashboards/kvmesh"},
    }
    return {"apiVersion": 1, "providers": [provider]}


def _data_sources() -> dict[str, Any]:
    """Return both data sources; addresses and the password are Grafana's environment."""
    prometheus = {
        "name": "Prometheus",
        "uid": "kvmesh-prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": "$KVMESH_PROMETHEUS_URL",
        "jsonData": {"timeInterval": "15s"},
    }
    redis = {
        "name": "Redis of the index",
        "uid": "kvmesh-redis",
        "type": "redis-datasource",
        "access": "proxy",
        "url": "$KVMESH_REDIS_URL",
        "jsonData": {"client": "standalone", "acl": True, "user": "$KVMESH_REDIS_USER"},
        "secureJsonData": {"password": "$KVMESH_REDIS_PASSWORD"},
    }
    return {"apiVersion": 1, "datasources": [prometheus, redis]}


def _prometheus() -> dict[str, Any]:
    """Return an example for `make demo`: one picker, one indexer, four simulated pods on this machine."""
    jobs = {
        PICKER: ["127.0.0.1:9090"],
        INDEXER: ["127.0.0.1:9091"],
        "vllm": [f"127.0.0.1:{port}" for port in range(8101, 8105)],
    }
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "30s"},
        "rule_files": ["kvmesh.rules.yaml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": targets}]} for job, targets in jobs.items()
        ],
    }


def _yaml(content: dict[str, Any]) -> str:
    return HEADER + yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True)


def write(folder: Path) -> None:
    """Write the files into `folder`, and remove what is no longer made."""
    write_tree(folder, monitoring_files(), old=[path for path in folder.rglob("*") if path.is_file()])


if __name__ == "__main__":
    write(Path(sys.argv[1]))

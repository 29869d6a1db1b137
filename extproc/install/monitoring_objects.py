"""What `--monitoring` installs: ServiceMonitors and rules for the Prometheus operator, dashboards for Grafana.

Pure; used by `render`.
"""

import json
from typing import Any

from extproc.install.labels import component_labels, object_meta
from extproc.install.plan import INDEXER, PICKER, InstallPlan
from extproc.install.shipped_files import read_dashboards, read_rules

RULES, DASHBOARD_FILES = "kvmesh-rules", "kvmesh-dashboards"  # as components: each has a file of its own
SIDECAR_LABEL = {"grafana_dashboard": "1"}  # what the sidecar of Grafana's chart looks for, unless told otherwise
SIDECAR_FOLDER = {"grafana_folder": "kvmesh"}


def monitoring_objects(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return what has picker and indexer scraped, watched and shown, or nothing where that is not wanted."""
    if not plan.monitoring:
        return []
    monitors = [_service_monitor(component, plan.namespace) for component in (PICKER, INDEXER)]
    boards = [_dashboard(uid, board, plan.namespace) for uid, board in read_dashboards().items()]
    return [*monitors, _rules(plan.namespace), *boards]


def _service_monitor(component: str, namespace: str) -> dict[str, Any]:
    # the operator adds a label `endpoint` (the port's name) to every series: ours, a pod's address, has to win
    end = {"port": "http-admin", "path": "/metrics", "interval": "15s", "honorLabels": True}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": object_meta(component, namespace, component=component),
        "spec": {
            "selector": {"matchLabels": component_labels(component)},
            "endpoints": [end],
        },
    }


def _rules(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": object_meta(RULES, namespace, component=RULES),
        "spec": read_rules(),
    }


def _dashboard(uid: str, board: dict[str, Any], namespace: str) -> dict[str, Any]:
    meta = object_meta(f"{uid}-dashboard", namespace, component=DASHBOARD_FILES)
    meta["labels"] |= SIDECAR_LABEL
    meta["annotations"] = dict(SIDECAR_FOLDER)
    text = json.dumps(board, ensure_ascii=False, separators=(",", ":"))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {f"{uid}.json": text}}

"""ServiceMonitors for the Prometheus operator. Pure; used by `render`."""

from typing import Any

from extproc.install.labels import component_labels, object_meta
from extproc.install.plan import INDEXER, PICKER, InstallPlan


def monitoring_objects(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return what has picker and indexer scraped, or nothing where that is not wanted."""
    if not plan.monitoring:
        return []
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "ServiceMonitor",
            "metadata": object_meta(component, plan.namespace, component=component),
            "spec": {
                "selector": {"matchLabels": component_labels(component)},
                "endpoints": [{"port": "http-admin", "path": "/metrics", "interval": "15s"}],
            },
        }
        for component in (PICKER, INDEXER)
    ]

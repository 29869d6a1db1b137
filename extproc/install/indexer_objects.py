"""The indexer: Deployment, Service for its metrics, disruption budget. Pure; used by `render`."""

from typing import Any

from extproc.install.labels import account_object, component_labels, object_meta, service_object
from extproc.install.picker_objects import watched_namespaces
from extproc.install.plan import INDEXER, InstallPlan
from extproc.install.pod_parts import SETTLE_SECONDS, pod_template, role_container, role_volumes

ADMIN_PORT = 9091


def indexer_objects(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the indexer's objects but for its rights and its neighbours."""
    return [account_object(INDEXER, plan.namespace), _service(plan), _deployment(plan), _budget(plan)]


def _service(plan: InstallPlan) -> dict[str, Any]:
    port = {"name": "http-admin", "port": ADMIN_PORT, "targetPort": "http-admin", "appProtocol": "http"}
    return service_object(INDEXER, plan.namespace, port)


def _deployment(plan: InstallPlan) -> dict[str, Any]:
    container = role_container(
        plan,
        "indexer",
        settings={"host": "0.0.0.0", "indexer_admin_port": str(ADMIN_PORT)},
        namespaces=watched_namespaces(plan),
        ports=[{"name": "http-admin", "containerPort": ADMIN_PORT}],
        cpu="500m",
        memory="256Mi",
    )
    template = pod_template(
        plan,
        INDEXER,
        {"containers": [container], "volumes": role_volumes(plan)},
        grace_seconds=SETTLE_SECONDS,  # its leases run out in 2 s and another indexer goes on
        token=True,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": object_meta(INDEXER, plan.namespace, component=INDEXER),
        "spec": {
            "replicas": plan.indexer_replicas,
            "selector": {"matchLabels": component_labels(INDEXER)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": template,
        },
    }


def _budget(plan: InstallPlan) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": object_meta(INDEXER, plan.namespace, component=INDEXER),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": component_labels(INDEXER)},
        },
    }

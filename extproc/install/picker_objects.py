"""The picker: Deployment, Service, and what keeps enough of it running. Pure; used by `render`."""

from typing import Any

from extproc.install.ext_proc_filter import GRPC_PORT
from extproc.install.istio_release import plan_wiring
from extproc.install.labels import account_object, component_labels, object_meta, service_object
from extproc.install.plan import PICKER, InstallPlan, Scope
from extproc.install.pod_parts import SETTLE_SECONDS, pod_template, role_container, role_volumes

ADMIN_PORT = 9090
MODELS = "/models"
BUSY_PERCENT = 60  # of the one core that a picker can use, where another one is started


def picker_objects(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the picker's objects but for its rights and its neighbours."""
    return [account_object(PICKER, plan.namespace), _service(plan), _deployment(plan), _budget(plan), _autoscaler(plan)]


def _service(plan: InstallPlan) -> dict[str, Any]:
    # name and appProtocol make Istio speak HTTP/2 to it; without, every pick would fail
    picks = {"name": "grpc-ext-proc", "port": GRPC_PORT, "targetPort": "grpc", "appProtocol": "grpc"}
    admin = {"name": "http-admin", "port": ADMIN_PORT, "targetPort": "http-admin", "appProtocol": "http"}
    return service_object(PICKER, plan.namespace, picks, admin)


def _deployment(plan: InstallPlan) -> dict[str, Any]:
    container = role_container(
        plan,
        "extproc",
        settings=_settings(plan),
        namespaces=watched_namespaces(plan),
        ports=[
            {"name": "grpc", "containerPort": GRPC_PORT},
            {"name": "http-admin", "containerPort": ADMIN_PORT},
        ],
        cpu="1",
        memory="512Mi",
    )
    volumes = role_volumes(plan)
    if plan.tokenizers_claim:
        container["env"].append({"name": "KVMESH_TOKENIZERS", "value": MODELS})  # of models that pods alone tell
        container["volumeMounts"].append({"name": "models", "mountPath": MODELS, "readOnly": True})
        claim = {"claimName": plan.tokenizers_claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    template = pod_template(
        plan,
        PICKER,
        {"containers": [container], "volumes": volumes},
        grace_seconds=plan.drain_seconds + SETTLE_SECONDS,
        token=True,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": object_meta(PICKER, plan.namespace, component=PICKER),
        "spec": {  # no `replicas`: they are the autoscaler's
            "selector": {"matchLabels": component_labels(PICKER)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "minReadySeconds": 5,
            "template": template,
        },
    }


def _settings(plan: InstallPlan) -> dict[str, str]:
    return {
        "host": "0.0.0.0",
        "grpc_port": str(GRPC_PORT),
        "admin_port": str(ADMIN_PORT),
        "steering": plan_wiring(plan).steering.value,
        "drain_seconds": str(plan.drain_seconds),
        "root_namespace": plan.root_namespace,
    }


def watched_namespaces(plan: InstallPlan) -> list[str]:
    """Return what a namespaced installation reads: its own namespace (for mesh-wide policies) and the pools'."""
    if plan.scope is Scope.MESH:
        return []
    return list(dict.fromkeys([plan.namespace, *(pool.namespace for pool in plan.pools)]))


def _budget(plan: InstallPlan) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": object_meta(PICKER, plan.namespace, component=PICKER),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": component_labels(PICKER)},
        },
    }


def _autoscaler(plan: InstallPlan) -> dict[str, Any]:
    """Scale by the picker's own CPU, which is what ends first; the proxy beside it does not count."""
    cpu = {"name": "cpu", "container": "extproc", "target": {"type": "Utilization", "averageUtilization": BUSY_PERCENT}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": object_meta(PICKER, plan.namespace, component=PICKER),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": PICKER},
            "minReplicas": plan.picker_replicas,
            "maxReplicas": plan.picker_replicas_max,
            "metrics": [{"type": "ContainerResource", "containerResource": cpu}],
            "behavior": {
                "scaleUp": {
                    "stabilizationWindowSeconds": 0,
                    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
                },
                # each picker that goes takes what it knew of its own routes with it
                "scaleDown": {
                    "stabilizationWindowSeconds": 300,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}],
                },
            },
        },
    }

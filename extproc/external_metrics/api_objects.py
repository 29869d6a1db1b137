"""The objects of the external-metrics API as JSON: discovery, lists of values, and errors of kind Status. Pure.

https://github.com/kubernetes/metrics/blob/master/pkg/apis/external_metrics/v1beta1/types.go
"""

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from math import ceil
from typing import Any

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
GROUP_VERSION = f"{GROUP}/{VERSION}"
KIND = "ExternalMetricValueList"
Json = dict[str, Any]

# the reasons of k8s.io/apimachinery/pkg/apis/meta/v1/types.go
REASONS: Mapping[int, str] = {
    HTTPStatus.BAD_REQUEST: "BadRequest",
    HTTPStatus.UNAUTHORIZED: "Unauthorized",
    HTTPStatus.FORBIDDEN: "Forbidden",
    HTTPStatus.NOT_FOUND: "NotFound",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowed",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailable",
}


def status(code: int, message: str) -> Json:
    """Return an error as clients of Kubernetes read it."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": REASONS.get(code, ""),
        "code": int(code),
    }


def group() -> Json:
    """Return what there is of the group."""
    version = {"groupVersion": GROUP_VERSION, "version": VERSION}
    return {"kind": "APIGroup", "apiVersion": "v1", "name": GROUP, "versions": [version], "preferredVersion": version}


def groups() -> Json:
    """Return the only group."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group()]}


def resources(metrics: Iterable[str]) -> Json:
    """Return the metrics, each of which is a resource of the group."""
    listed = [
        {"name": name, "singularName": "", "namespaced": True, "kind": KIND, "verbs": ["get"]} for name in metrics
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": listed}


def values(metric: str, labels: Mapping[str, str], value: float, *, timestamp: str) -> Json:
    """Return a list of one value."""
    item = {
        "metricName": metric,
        "metricLabels": dict(labels),
        "timestamp": timestamp,
        "value": quantity(value),
    }
    return {"kind": KIND, "apiVersion": GROUP_VERSION, "metadata": {}, "items": [item]}


def quantity(value: float) -> str:
    """Return a number as Kubernetes writes it: whole, or in thousandths, rounded up as it does."""
    return str(int(value)) if float(value).is_integer() else f"{ceil(value * 1000 - 1e-9)}m"

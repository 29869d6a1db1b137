"""The kinds of an installation's objects, and their common names and labels. Pure.

`kvmesh uninstall` finds the objects by these labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

Document = dict[str, Any]

MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
NAME = "app.kubernetes.io/name"
OWNER = "kvmesh-install"
STATUS_LEASE = "kvmesh-status-writer"  # name of a Lease and its Role; the Lease's holder writes policy status
SPACES = "kvmesh.io/namespaces"  # annotation of that Role: namespaces with the installation's objects
INSTALLATION = "kvmesh.io/installation"  # label: the installation's namespace; a cluster may have several
EXPORT_TO = "networking.istio.io/exportTo"  # annotation of a Service: namespaces whose proxies may see it
LONGEST_NAME = 63  # characters of a Service's name
OWNED = {PART_OF: "kvmesh", MANAGED_BY: OWNER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind in the Kubernetes API."""

    name: str
    group: str
    version: str
    plural: str
    namespaced: bool = True
    optional: bool = False  # may be missing in a cluster; uninstalling then skips it

    @property
    def api_version(self) -> str:
        """The value of a document's `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version


CRD = Kind(
    name="CustomResourceDefinition",
    group="apiextensions.k8s.io",
    version="v1",
    plural="customresourcedefinitions",
    namespaced=False,
)
NAMESPACE = Kind(name="Namespace", group="", version="v1", plural="namespaces", namespaced=False)
ENVOY_FILTER = Kind(
    name="EnvoyFilter", group="networking.istio.io", version="v1alpha3", plural="envoyfilters", optional=True
)
DESTINATION_RULE = Kind(
    name="DestinationRule", group="networking.istio.io", version="v1", plural="destinationrules", optional=True
)
SECRET = Kind(name="Secret", group="", version="v1", plural="secrets")
DEPLOYMENT = Kind(name="Deployment", group="apps", version="v1", plural="deployments")
STATEFUL_SET = Kind(name="StatefulSet", group="apps", version="v1", plural="statefulsets")
POD = Kind(name="Pod", group="", version="v1", plural="pods")  # read only
ROLE = Kind(name="Role", group="rbac.authorization.k8s.io", version="v1", plural="roles")
POLICY = Kind(name="InferencePolicy", group="kvmesh.io", version="v1alpha1", plural="inferencepolicies", optional=True)

_RBAC = "rbac.authorization.k8s.io"
_SECURITY = "security.istio.io"
KINDS = (
    NAMESPACE,
    CRD,
    Kind(name="ClusterRole", group=_RBAC, version="v1", plural="clusterroles", namespaced=False),
    Kind(name="ClusterRoleBinding", group=_RBAC, version="v1", plural="clusterrolebindings", namespaced=False),
    ROLE,
    Kind(name="RoleBinding", group=_RBAC, version="v1", plural="rolebindings"),
    Kind(name="Lease", group="coordination.k8s.io", version="v1", plural="leases"),
    Kind(name="ServiceAccount", group="", version="v1", plural="serviceaccounts"),
    SECRET,
    Kind(name="Service", group="", version="v1", plural="services"),
    STATEFUL_SET,
    Kind(name="PersistentVolumeClaim", group="", version="v1", plural="persistentvolumeclaims"),
    DEPLOYMENT,
    Kind(name="PodDisruptionBudget", group="policy", version="v1", plural="poddisruptionbudgets"),
    Kind(name="HorizontalPodAutoscaler", group="autoscaling", version="v2", plural="horizontalpodautoscalers"),
    Kind(name="NetworkPolicy", group="networking.k8s.io", version="v1", plural="networkpolicies"),
    DESTINATION_RULE,
    Kind(name="Sidecar", group="networking.istio.io", version="v1", plural="sidecars", optional=True),
    Kind(name="PeerAuthentication", group=_SECURITY, version="v1", plural="peerauthentications", optional=True),
    Kind(name="AuthorizationPolicy", group=_SECURITY, version="v1", plural="authorizationpolicies", optional=True),
    Kind(name="ConfigMap", group="", version="v1", plural="configmaps"),
    Kind(name="ServiceMonitor", group="monitoring.coreos.com", version="v1", plural="servicemonitors", optional=True),
    Kind(name="PrometheusRule", group="monitoring.coreos.com", version="v1", plural="prometheusrules", optional=True),
    ENVOY_FILTER,
)


def kind_of(name: str) -> Kind:
    """Return the kind with this name."""
    return next(kind for kind in KINDS if kind.name == name)


def describe(document: Document) -> str:
    """Return an object's kind, namespace and name as text."""
    meta = document["metadata"]
    where = f"{meta['namespace']}/" if "namespace" in meta else ""
    return f"{document['kind']} {where}{meta['name']}"


def kube_object(
    kind: str,
    name: str,
    namespace: str | None,
    *,
    component: str | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    **content: Any,
) -> Document:
    """Return an object with our labels; `namespace` is None for cluster-wide objects."""
    meta: dict[str, Any] = {"name": name}
    if namespace is not None:
        meta["namespace"] = namespace
    meta["labels"] = {**(component_labels(component) if component else {}), **OWNED, **(labels or {})}
    if annotations:
        meta["annotations"] = dict(annotations)
    return {"apiVersion": kind_of(kind).api_version, "kind": kind, "metadata": meta, **content}


def fitting_name(before: str, pool: str, after: str = "") -> str:
    """Return a Service name for a pool; long pool names are cut and made unique by a digest."""
    name = f"{before}{pool}{after}"
    if len(name) <= LONGEST_NAME:
        return name
    return f"{before}{pool[:40].rstrip('-')}-{sha256(pool.encode()).hexdigest()[:8]}{after}"


def component_object(kind: str, component: str, namespace: str, **content: Any) -> Document:
    """Return an object of a component, under the component's name."""
    return kube_object(kind, component, namespace, component=component, **content)


def component_labels(component: str) -> dict[str, str]:
    """Return the labels that select a component's pods. Never change them: Deployment selectors are immutable."""
    return {NAME: component, PART_OF: "kvmesh"}


def pods_of(component: str) -> dict[str, Any]:
    """Return the label selector of a component's pods."""
    return {"matchLabels": component_labels(component)}

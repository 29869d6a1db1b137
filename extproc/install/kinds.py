"""The kinds of object that an installation is made of, in the order in which they are applied. Values only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How the API names a kind."""

    name: str
    group: str
    version: str
    plural: str
    namespaced: bool = True
    optional: bool = False  # not in every cluster: uninstalling does not need it

    @property
    def api_version(self) -> str:
        """What documents say."""
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
POLICY = Kind(name="InferencePolicy", group="kvmesh.io", version="v1alpha1", plural="inferencepolicies", optional=True)

_RBAC = "rbac.authorization.k8s.io"
_SECURITY = "security.istio.io"
KINDS = (
    NAMESPACE,
    CRD,
    Kind(name="ClusterRole", group=_RBAC, version="v1", plural="clusterroles", namespaced=False),
    Kind(name="ClusterRoleBinding", group=_RBAC, version="v1", plural="clusterrolebindings", namespaced=False),
    Kind(name="Role", group=_RBAC, version="v1", plural="roles"),
    Kind(name="RoleBinding", group=_RBAC, version="v1", plural="rolebindings"),
    Kind(name="Lease", group="coordination.k8s.io", version="v1", plural="leases"),
    Kind(name="ServiceAccount", group="", version="v1", plural="serviceaccounts"),
    SECRET,
    Kind(name="Service", group="", version="v1", plural="services"),
    Kind(name="StatefulSet", group="apps", version="v1", plural="statefulsets"),
    Kind(name="PersistentVolumeClaim", group="", version="v1", plural="persistentvolumeclaims"),
    DEPLOYMENT,
    Kind(name="PodDisruptionBudget", group="policy", version="v1", plural="poddisruptionbudgets"),
    Kind(name="HorizontalPodAutoscaler", group="autoscaling", version="v2", plural="horizontalpodautoscalers"),
    Kind(name="NetworkPolicy", group="networking.k8s.io", version="v1", plural="networkpolicies"),
    DESTINATION_RULE,
    Kind(name="PeerAuthentication", group=_SECURITY, version="v1", plural="peerauthentications", optional=True),
    Kind(name="AuthorizationPolicy", group=_SECURITY, version="v1", plural="authorizationpolicies", optional=True),
    Kind(name="ConfigMap", group="", version="v1", plural="configmaps"),
    Kind(name="ServiceMonitor", group="monitoring.coreos.com", version="v1", plural="servicemonitors", optional=True),
    Kind(name="PrometheusRule", group="monitoring.coreos.com", version="v1", plural="prometheusrules", optional=True),
    ENVOY_FILTER,
)


def kind_of(name: str) -> Kind:
    """Return the kind that documents call `name`."""
    return next(kind for kind in KINDS if kind.name == name)

"""Which resources the server has: the built-in ones that tests need, and those that CustomResourceDefinitions add."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.kube_api.errors import Document
from tests.kube_api.store import ResourceKey

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One resource in one version."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    status: bool = False  # has the subresource
    generation: bool = False  # counts changes of the spec
    fields: frozenset[str] = frozenset()  # for field selectors, beside name and namespace
    schema: Document | None = field(default=None, hash=False, compare=False)  # of a CRD's version
    storage_version: str = ""

    @property
    def key(self) -> ResourceKey:
        return self.group, self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def custom(self) -> bool:
        return self.schema is not None


def _built_in(row: str) -> Resource:
    api_version, plural, kind, scope, flags, short = (row + " -").split()[:6]
    group, _, version = api_version.rpartition("/")
    return Resource(
        group=group,
        version=version,
        plural=plural,
        kind=kind,
        namespaced=scope == "ns",
        status="s" in flags,
        generation="g" in flags,
        short_names=() if short == "-" else tuple(short.split(",")),
        categories=("all",) if "a" in flags else (),
        fields=_FIELDS.get(kind, frozenset()),
    )


_FIELDS = {
    "Pod": frozenset({"spec.nodeName", "status.phase", "status.podIP", "spec.serviceAccountName"}),
    "Secret": frozenset({"type"}),
    "Namespace": frozenset({"status.phase"}),
    "Event": frozenset({"involvedObject.name", "involvedObject.kind", "involvedObject.namespace", "reason", "type"}),
}

# api version, plural, kind, scope, flags (s: status subresource, g: generation, a: in the category all), short names
_BUILT_IN = """
v1 namespaces Namespace cluster s ns
v1 nodes Node cluster s no
v1 pods Pod ns sa po
v1 services Service ns sa svc
v1 endpoints Endpoints ns - ep
v1 configmaps ConfigMap ns - cm
v1 secrets Secret ns -
v1 serviceaccounts ServiceAccount ns - sa
v1 events Event ns - ev
v1 persistentvolumeclaims PersistentVolumeClaim ns s pvc
v1 resourcequotas ResourceQuota ns s quota
v1 limitranges LimitRange ns - limits
apps/v1 deployments Deployment ns sga deploy
apps/v1 replicasets ReplicaSet ns sga rs
apps/v1 statefulsets StatefulSet ns sga sts
apps/v1 daemonsets DaemonSet ns sga ds
batch/v1 jobs Job ns sga
batch/v1 cronjobs CronJob ns sga cj
autoscaling/v2 horizontalpodautoscalers HorizontalPodAutoscaler ns sa hpa
policy/v1 poddisruptionbudgets PodDisruptionBudget ns sg pdb
networking.k8s.io/v1 networkpolicies NetworkPolicy ns g netpol
networking.k8s.io/v1 ingresses Ingress ns sg ing
discovery.k8s.io/v1 endpointslices EndpointSlice ns g
coordination.k8s.io/v1 leases Lease ns -
events.k8s.io/v1 events Event ns - ev
scheduling.k8s.io/v1 priorityclasses PriorityClass cluster g pc
storage.k8s.io/v1 storageclasses StorageClass cluster - sc
rbac.authorization.k8s.io/v1 roles Role ns -
rbac.authorization.k8s.io/v1 rolebindings RoleBinding ns -
rbac.authorization.k8s.io/v1 clusterroles ClusterRole cluster -
rbac.authorization.k8s.io/v1 clusterrolebindings ClusterRoleBinding cluster -
apiextensions.k8s.io/v1 customresourcedefinitions CustomResourceDefinition cluster sg crd,crds
admissionregistration.k8s.io/v1 validatingwebhookconfigurations ValidatingWebhookConfiguration cluster g
admissionregistration.k8s.io/v1 mutatingwebhookconfigurations MutatingWebhookConfiguration cluster g
apiregistration.k8s.io/v1 apiservices APIService cluster s
"""


class Registry:
    """All resources by (group, version, plural)."""

    def __init__(self) -> None:
        rows = [_built_in(row) for row in _BUILT_IN.strip().splitlines()]
        self._resources = {(one.group, one.version, one.plural): one for one in rows}

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._resources.values())

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._resources.get((group, version, plural))

    def of_kind(self, kind: str, group: str | None = None, version: str | None = None) -> Resource | None:
        """By "Kind" or "Kind.group"; the first where several groups have it."""
        if group is None and "." in kind:
            kind, _, group = kind.partition(".")
        for one in self:
            if one.kind == kind and group in {None, one.group} and version in {None, one.version}:
                return one
        return None

    def of_document(self, document: Document) -> Resource | None:
        group, _, version = str(document.get("apiVersion", "")).rpartition("/")
        return self.of_kind(str(document.get("kind", "")), group, version)

    def versions(self, group: str) -> list[str]:
        return list(dict.fromkeys(one.version for one in self if one.group == group))

    def groups(self) -> list[str]:
        return list(dict.fromkeys(one.group for one in self if one.group))

    def add_definition(self, definition: Document) -> None:
        """Serve what a CustomResourceDefinition describes, instead of what it described before."""
        self.drop_definition(definition)
        for one in resources_of(definition):
            self._resources[one.group, one.version, one.plural] = one

    def drop_definition(self, definition: Document) -> None:
        spec = definition["spec"]
        gone = [path for path, one in self._resources.items() if one.key == (spec["group"], spec["names"]["plural"])]
        for path in gone:
            del self._resources[path]


def resources_of(definition: Document) -> list[Resource]:
    """One resource for each served version of a CustomResourceDefinition."""
    spec: Any = definition["spec"]
    names = spec["names"]
    storage = next(version["name"] for version in spec["versions"] if version.get("storage"))
    return [
        Resource(
            group=spec["group"],
            version=version["name"],
            plural=names["plural"],
            kind=names["kind"],
            namespaced=spec["scope"] == "Namespaced",
            short_names=tuple(names.get("shortNames", ())),
            categories=tuple(names.get("categories", ())),
            status="status" in version.get("subresources", {}),
            generation=True,
            fields=frozenset(one["jsonPath"].lstrip(".") for one in version.get("selectableFields", ())),
            schema=version["schema"]["openAPIV3Schema"],
            storage_version=storage,
        )
        for version in spec["versions"]
        if version.get("served")
    ]

"""Renders an install plan to Kubernetes objects in the order of application. Pure.

The plan is validated first; each error names the flag to change.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml

from extproc.errors import ConfigError
from operate.install.envoy_filters import envoy_filters
from operate.install.model_volume import check_model_folders
from operate.install.native_pools import picker_services
from operate.install.network_objects import mesh_objects, network_objects
from operate.install.objects import INSTALLATION, NAME, OWNED, Document, component_object, kube_object, pods_of
from operate.install.plan import (
    INDEXER,
    PICKER,
    SECRET_KEY,
    BodyMode,
    FailureMode,
    InstallPlan,
    MeshMembership,
    Mode,
    RedisKind,
    Scope,
)
from operate.install.pod_parts import revision_label
from operate.install.shipped_files import read_dashboards, read_rules
from operate.install.workloads import indexer_objects, picker_objects, rbac_objects, redis_objects

POD_SECURITY = "pod-security.kubernetes.io/"
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_NAME = re.compile(rf"{DNS_LABEL.pattern}(\.{DNS_LABEL.pattern})*")
KINDS_OF_REDIS = ("", "+sentinel", "+cluster")
REDIS_SCHEMES = tuple(f"{scheme}{kind}://" for kind in KINDS_OF_REDIS for scheme in ("redis", "rediss"))
RULES, DASHBOARD_FILES = "kvmesh-rules", "kvmesh-dashboards"  # component names: each has its own file
SIDECAR_LABEL = {"grafana_dashboard": "1"}  # default label of the Grafana chart's sidecar
SIDECAR_FOLDER = {"grafana_folder": "kvmesh"}


def render(plan: InstallPlan, *, crds: Sequence[Document] = ()) -> list[Document]:
    """Return all objects of the installation, including `crds`. Raise ConfigError for an invalid plan.

    EnvoyFilters come last: they need everything else to exist.
    """
    check_plan(plan)
    documents = [
        *([_namespace(plan)] if plan.owns_namespace else []),
        *rbac_objects(plan),
        *redis_objects(plan),
        *indexer_objects(plan),
        *picker_objects(plan),
        *network_objects(plan),
        *mesh_objects(plan),
        *monitoring_objects(plan),
        *(picker_services(plan) if plan.mode is Mode.INFERENCE_POOL else envoy_filters(plan)),
    ]
    _check_unique(documents)
    mark = {INSTALLATION: plan.namespace}  # distinguishes installations, which share the CRDs
    return [*(_labelled(crd, OWNED) for crd in crds), *(_labelled(each, OWNED | mark) for each in documents)]


def _check_unique(documents: Iterable[Document]) -> None:
    """Raise ConfigError for name collisions: pool `a-pods` and the pods of pool `a` both need `kvmesh-a-pods`."""
    seen: set[tuple[str, str, str]] = set()
    for document in documents:
        meta = document["metadata"]
        key = (document["kind"], meta.get("namespace", ""), meta["name"])
        if key in seen:
            raise ConfigError(f"--pool: two of them need a {key[0]} {key[1]}/{key[2]}; rename the Service of one")
        seen.add(key)


def to_yaml(documents: Iterable[Document]) -> str:
    """Return the documents as a YAML stream, with keys in insertion order."""
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, explicit_start=True, width=120)


class _Plain(yaml.SafeDumper):
    """Writes repeated values in full, because anchors are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class's signature
        return True


def _namespace(plan: InstallPlan) -> Document:
    # without the CNI plugin, sidecars need an init container that sets up iptables
    standard = "privileged" if plan.membership is MeshMembership.SIDECAR else "restricted"
    security = {f"{POD_SECURITY}{mode}": "restricted" for mode in ("warn", "audit")}
    labels = {NAME: plan.namespace, **OWNED, f"{POD_SECURITY}enforce": standard, **security, **revision_label(plan)}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": plan.namespace, "labels": labels}}


def _labelled(document: Document, labels: dict[str, str]) -> Document:
    meta = document["metadata"]
    return {**document, "metadata": {**meta, "labels": {**meta.get("labels", {}), **labels}}}


def monitoring_objects(plan: InstallPlan) -> list[Document]:
    """Return ServiceMonitors, rules and dashboards, or nothing without monitoring."""
    if not plan.monitoring:
        return []
    # the operator adds a label `endpoint` (the port's name); honorLabels keeps ours (a pod's address)
    end = {"port": "http-admin", "path": "/metrics", "interval": "15s", "honorLabels": True}
    monitors = [
        component_object("ServiceMonitor", each, plan.namespace, spec={"selector": pods_of(each), "endpoints": [end]})
        for each in (PICKER, INDEXER)
    ]
    rules = component_object("PrometheusRule", RULES, plan.namespace, spec=read_rules())
    boards = [
        kube_object(
            "ConfigMap",
            f"{uid}-dashboard",
            plan.namespace,
            component=DASHBOARD_FILES,
            labels=SIDECAR_LABEL,
            annotations=SIDECAR_FOLDER,
            data={f"{uid}.json": json.dumps(board, ensure_ascii=False, separators=(",", ":"))},
        )
        for uid, board in read_dashboards().items()
    ]
    return [*monitors, rules, *boards]


def check_plan(plan: InstallPlan) -> None:
    """Raise ConfigError for an invalid or contradictory plan."""
    _check_names(plan)
    _check_targets(plan)
    if plan.failure_mode is FailureMode.FAIL_OPEN and plan.body_mode is BodyMode.DUPLEX:
        raise ConfigError(
            f"--failure-mode FailOpen: not with --body-mode {BodyMode.DUPLEX}: Envoy cannot fail open once a byte of "
            f"the body is on its way to the picker. Leave --body-mode out or say {BodyMode.BUFFERED}"
        )
    _check_redis(plan)
    check_model_folders(plan)
    _check_numbers(plan)


def _check_names(plan: InstallPlan) -> None:
    names = {
        "--namespace": [plan.namespace],
        "--root-namespace": [plan.root_namespace],
        "--monitoring-namespace": [plan.monitoring_namespace],
        "--pool": [part for pool in plan.pools for part in (pool.namespace, pool.name)],
        "--gateway": [part for gateway in plan.gateways for part in (gateway.namespace, *gateway.name.split("."))],
        "--clients": [clients.namespace for clients in plan.clients],
        "--istio-revision": [plan.istio_revision] if plan.istio_revision else [],
    }
    for flag, values in names.items():
        for value in values:
            if DNS_LABEL.fullmatch(value) is None:
                raise ConfigError(f"{flag}: {value!r} is no Kubernetes name (a-z, 0-9 and -, at most 63 characters)")
    if SECRET_KEY.fullmatch(plan.pod_key_secret_key) is None:
        raise ConfigError(
            f"--pod-key-secret-key: {plan.pod_key_secret_key!r} is no key of a Secret (letters, digits, -, _ and dots)"
        )
    for flag, name in _long_names(plan):
        if DNS_NAME.fullmatch(name) is None:
            raise ConfigError(f"{flag}: {name!r} is no Kubernetes name (a-z, 0-9, - and dots)")


def _long_names(plan: InstallPlan) -> Iterator[tuple[str, str]]:
    """Yield the names that may contain dots, with their flags."""
    given = {
        "--redis-password-secret": plan.redis_password_secret,
        "--redis-sentinel-password-secret": plan.redis_sentinel_password_secret,
        "--redis-ca-secret": plan.redis_ca_secret,
        "--redis-tls-secret": plan.redis_tls_secret,
        "--admin-token-secret": plan.admin_token_secret,
        "--pod-key-secret": plan.pod_key_secret,
        "--tokenizers-claim": plan.tokenizers_claim,
        "--model-cache-claim": plan.model_cache_claim,
        "--hub-token-secret": plan.hub_token_secret,
    }
    yield from ((flag, name) for flag, name in given.items() if name is not None)
    yield "--trust-domain", plan.trust_domain
    yield from (("--image-pull-secret", name) for name in plan.image_pull_secrets)
    yield from (("--gateway", gateway.service_account) for gateway in plan.gateways)


def _check_targets(plan: InstallPlan) -> None:
    _refuse_twice("--pool", (pool.identity for pool in plan.pools))
    _refuse_twice("--gateway", (f"{gateway.namespace}/{gateway.name}" for gateway in plan.gateways))
    _refuse_twice("--hostname", (f"{each.host}:{each.port}/{each.route or ''}" for each in plan.routes))
    _refuse_twice("--clients", (each.namespace for each in plan.clients))
    if not plan.pools:
        raise ConfigError("--pool is missing: the Service of the vLLM pods, as NAMESPACE/NAME:PORT")
    if plan.mode is Mode.SIDECAR:
        if not plan.clients:
            raise ConfigError("--mode sidecar needs --clients: whose sidecars are to ask the picker")
        if any(not clients.selector for clients in plan.clients):
            raise ConfigError("--clients: without labels the picker's own sidecar would ask the picker, in a loop")
        if plan.gateways or plan.routes:
            raise ConfigError("--gateway and --hostname: not with --mode sidecar, where the sidecars of --clients ask")
        return
    if plan.mode is Mode.INFERENCE_POOL:
        _check_native_pools(plan)
        return
    if not plan.gateways or not plan.routes:
        missing = "--gateway" if not plan.gateways else "--hostname"
        raise ConfigError(f"--mode {plan.mode} needs {missing}")
    unserved = {pool.identity for pool in plan.pools} - {route.pool.identity for route in plan.routes}
    if unserved:
        names = ", ".join(sorted(unserved))
        raise ConfigError(f"--hostname: none leads to {names}; write --hostname HOST=NAMESPACE/NAME")
    if plan.clients:
        raise ConfigError(f"--clients: not with --mode {plan.mode}, where the pods of --gateway ask")


def _check_native_pools(plan: InstallPlan) -> None:
    if not plan.gateways:
        raise ConfigError(f"--mode {plan.mode} needs --gateway: who may ask the picker")
    if plan.routes or plan.clients:
        raise ConfigError(
            f"--hostname and --clients: not with --mode {plan.mode}, where HTTPRoutes lead to InferencePools"
        )
    elsewhere = sorted({pool.identity for pool in plan.pools if pool.namespace != plan.namespace})
    if elsewhere:
        raise ConfigError(
            f"--pool {elsewhere[0]}: an InferencePool and the picker that it names are in one namespace: "
            f"say --namespace {elsewhere[0].partition('/')[0]}, and install once for each namespace"
        )
    if plan.failure_mode is FailureMode.FAIL_OPEN or plan.body_mode is not None:
        raise ConfigError(
            f"--failure-mode and --body-mode: not with --mode {plan.mode}: the InferencePool says the one "
            "(endpointPickerRef.failureMode), Istio the other"
        )


def _refuse_twice(flag: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"{flag}: {value.removesuffix('/')} is given twice")
        seen.add(value)


def _check_redis(plan: InstallPlan) -> None:
    if plan.redis is RedisKind.EXTERNAL and not plan.redis_url:
        raise ConfigError("--redis is missing: the address of your Redis")
    of_own_redis = {
        "--redis-sentinel-password-secret": plan.redis_sentinel_password_secret,
        "--redis-ca-secret": plan.redis_ca_secret,
        "--redis-tls-secret": plan.redis_tls_secret,
    }
    for flag, value in of_own_redis.items():
        if value and plan.redis is RedisKind.BUNDLED:
            raise ConfigError(f"{flag}: is for a Redis of your own, and --redis is missing")
    if plan.redis_url and ("@" in plan.redis_url or "password=" in plan.redis_url):
        raise ConfigError(
            "--redis: a password does not belong into a URL that everybody may read: the parameter username, and "
            "--redis-password-secret for the name of a Secret"
        )
    if plan.redis_url and not plan.redis_url.startswith(REDIS_SCHEMES):
        raise ConfigError(f"--redis {plan.redis_url!r}: must begin with one of {', '.join(REDIS_SCHEMES)}")


def _check_numbers(plan: InstallPlan) -> None:
    if plan.picker_replicas_max < plan.picker_replicas:
        raise ConfigError(f"--max-replicas {plan.picker_replicas_max}: is below --replicas {plan.picker_replicas}")
    if plan.scope is Scope.NAMESPACED and plan.root_namespace != plan.namespace:
        raise ConfigError("--root-namespace: a namespaced installation reads mesh-wide policies from its own namespace")
    if plan.istio_revision and plan.membership is not MeshMembership.SIDECAR:
        raise ConfigError("--istio-revision: names who injects sidecars, so it needs --membership sidecar")
    if plan.mode is Mode.AMBIENT_GATEWAY and plan.membership is MeshMembership.SIDECAR:
        raise ConfigError("--mode ambient-gateway: kvmesh's own pods are in ambient, too: --membership ambient")

"""The folder `manifests/`, made from the same renderer as `kvmesh install`; a test keeps the files equal to this.

`python -m tools.kustomize_tree FOLDER` writes it. Each way to install is a plan. The base is what all plans have. A
component is what one plan has beside it: objects of its own, and JSON patches (RFC 6902) of common ones.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from operate.install.objects import OWNED, Document
from operate.install.parse_targets import parse_clients, parse_gateway
from operate.install.plan import (
    GatewayTarget,
    InstallPlan,
    IstioVersion,
    MeshMembership,
    Mode,
    PoolTarget,
    RedisKind,
    RouteTarget,
    Scope,
)
from operate.install.render import render, to_yaml
from operate.install.shipped_files import CRDS, read_crds

HEADER = "# Made by `python -m tools.kustomize_tree manifests`: change operate/install, not this.\n"
POOL = PoolTarget(namespace="llm", name="vllm-llama", selector={"app": "vllm-llama"})
GATEWAY: GatewayTarget = parse_gateway("istio-ingress/inference-gateway")
ROUTES = (RouteTarget(host="llm.example.com", pool=POOL),)
SAMPLE = InstallPlan(pools=(POOL,), gateways=(GATEWAY,), routes=ROUTES)
OUTSIDE_AMBIENT = replace(POOL, in_mesh=False)  # ambient endpoints are known to Envoy by other names than ip:port
AMBIENT: dict[str, Any] = {
    "mode": Mode.AMBIENT_GATEWAY,
    "membership": MeshMembership.AMBIENT,
    "pools": (OUTSIDE_AMBIENT,),
    "routes": (RouteTarget(host="llm.example.com", pool=OUTSIDE_AMBIENT),),
}
SIDECAR: dict[str, Any] = {
    "mode": Mode.SIDECAR,
    "gateways": (),
    "routes": (),
    "clients": (parse_clients("llm-clients"),),
}
EXTERNAL = {"redis": RedisKind.EXTERNAL, "redis_password_secret": "kvmesh-redis-password"}
Change = Mapping[str, Any]
Operation = dict[str, Any]
# An axis is a choice that is made once; the first value of each is the sample's.
AXES: Mapping[str, Mapping[str, Change]] = {
    "scope": {"mesh-wide": {}, "namespaced": {"scope": Scope.NAMESPACED, "root_namespace": SAMPLE.namespace}},
    "redis": {
        "bundled": {},
        "external": {**EXTERNAL, "redis_url": "redis://redis.redis.svc:6379/0"},
        "sentinel": {**EXTERNAL, "redis_url": "redis+sentinel://redis-sentinel.redis.svc:26379/mymaster/0"},
        "cluster": {**EXTERNAL, "redis_url": "redis+cluster://redis-cluster.redis.svc:6379"},
    },
    "monitoring": {"none": {}, "prometheus-operator": {"monitoring": True}},
    # last: ambient patches what the others bring
    "istio": {
        "1.28-gateway": {},
        "1.30-gateway": {"istio": IstioVersion(minor=30)},
        **{f"1.{minor}-sidecar": {"istio": IstioVersion(minor=minor), **SIDECAR} for minor in (28, 30)},
        **{f"1.{minor}-ambient-gateway": {"istio": IstioVersion(minor=minor), **AMBIENT} for minor in (28, 30)},
    },
}
# kinds that differ so much between releases that a patch could not be read
WHOLE = {"EnvoyFilter", "DestinationRule"}
OVERLAYS: Mapping[str, Mapping[str, str]] = {
    "mesh-wide": {},
    "namespaced": {"scope": "namespaced"},
    "redis-external": {"redis": "external"},
    "redis-sentinel": {"redis": "sentinel"},
    "redis-cluster": {"redis": "cluster"},
    "monitoring": {"monitoring": "prometheus-operator"},
    **{f"istio-{name}": {"istio": name} for name in AXES["istio"] if name != "1.28-gateway"},
}


def overlay_plan(choices: Mapping[str, str]) -> InstallPlan:
    """Return the plan of an overlay: the sample with a value of some axes."""
    changes: dict[str, Any] = {}
    for axis, name in choices.items():
        changes |= AXES[axis][name]
    return replace(SAMPLE, **changes)


def manifests() -> dict[str, str]:
    """Return the files of `manifests/` by their path in it, but for the CRDs."""
    base = sample = _by_key(render(SAMPLE))
    files: dict[str, str] = {}
    for axis, values in AXES.items():
        plans = {name: _by_key(render(replace(SAMPLE, **change))) for name, change in values.items()}
        common = set.intersection(*(set(plan) for plan in plans.values()))
        if axis == "istio":
            common = {key for key in common if key[0] not in WHOLE}
        for name, objects in plans.items():
            files |= _component(f"components/{axis}-{name}", objects, sample=sample, common=common)
        base = {
            key: document for key, document in base.items() if key in common or key not in set().union(*plans.values())
        }
    files |= _folder("base", base.values(), {"resources": ["../crds"]})
    for name, choices in OVERLAYS.items():
        parts = [f"../../components/{axis}-{choices.get(axis, next(iter(AXES[axis])))}" for axis in AXES]
        parts = [part for part in parts if f"{part.removeprefix('../../')}/kustomization.yaml" in files]
        content = {"resources": ["../../base"], "components": parts}
        files[f"overlays/{name}/kustomization.yaml"] = _kustomization(content)
    labels = [{"pairs": dict(OWNED), "includeSelectors": False}]
    files["crds/kustomization.yaml"] = _kustomization({"resources": list(CRDS), "labels": labels})
    files["kvmesh.yaml"] = HEADER + to_yaml(render(SAMPLE, crds=read_crds()))
    return files


def _component(
    path: str, objects: Mapping[tuple[str, ...], Document], *, sample: Mapping[Any, Document], common: set[Any]
) -> dict[str, str]:
    """Return a component's files, or none where it adds nothing."""
    own = [document for key, document in objects.items() if key not in common]
    patches = []
    for key in objects:
        operations = json_patch(sample[key], objects[key]) if key in common else []
        if operations:
            kind, namespace, name = key
            target = {"kind": kind, "name": name} | ({"namespace": namespace} if namespace else {})
            patches.append({"target": target, "patch": yaml.safe_dump(operations, sort_keys=False, width=120)})
    if not own and not patches:
        return {}
    further: dict[str, Any] = {"patches": patches} if patches else {}
    return _folder(path, own, further, kind="Component")


def _folder(
    path: str, documents: Iterable[Document], further: Mapping[str, Any], *, kind: str = "Kustomization"
) -> dict[str, str]:
    """Return a file for each component's objects, and the kustomization that lists them."""
    groups: dict[str, list[Document]] = {}
    for document in documents:
        groups.setdefault(_file_of(document), []).append(document)
    files = {f"{path}/{name}": HEADER + to_yaml(group) for name, group in groups.items()}
    listed = [*further.get("resources", []), *sorted(groups)]
    content = {**({"resources": listed} if listed else {}), **{k: v for k, v in further.items() if k != "resources"}}
    return files | {f"{path}/kustomization.yaml": _kustomization(content, kind=kind)}


def _file_of(document: Document) -> str:
    part = document["metadata"]["labels"].get("app.kubernetes.io/name", "mesh")
    return {
        "EnvoyFilter": "envoy-filters.yaml",
        "Namespace": "namespace.yaml",
        "NetworkPolicy": "network-policies.yaml",
        "DestinationRule": "destination-rules.yaml",
        "PeerAuthentication": "mtls.yaml",
        "AuthorizationPolicy": "mtls.yaml",
        "ServiceMonitor": "service-monitors.yaml",
    }.get(document["kind"], "rbac.yaml" if "Role" in document["kind"] else f"{part.removeprefix('kvmesh-')}.yaml")


def _kustomization(content: Mapping[str, Any], *, kind: str = "Kustomization") -> str:
    version = "v1alpha1" if kind == "Component" else "v1beta1"
    head = {"apiVersion": f"kustomize.config.k8s.io/{version}", "kind": kind}
    return HEADER + yaml.dump({**head, **content}, Dumper=_Readable, sort_keys=False, width=120)


class _Readable(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Readable.add_representer(str, _text)


def _by_key(documents: Sequence[Document]) -> dict[tuple[str, ...], Document]:
    return {(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each for each in documents}


def json_patch(old: Any, new: Any, *, path: str = "") -> list[Operation]:
    """Return operations that turn `old` into `new`; items of lists are compared by place."""
    return list(_changes(old, new, path))


def _changes(old: Any, new: Any, path: str) -> Iterator[Operation]:
    if isinstance(old, dict) and isinstance(new, dict):
        yield from _of_mapping(old, new, path)
    elif isinstance(old, list) and isinstance(new, list):
        yield from _of_list(old, new, path)
    elif old != new:
        yield {"op": "replace", "path": path, "value": new}


def _of_mapping(old: dict[str, Any], new: dict[str, Any], path: str) -> Iterator[Operation]:
    for key, value in old.items():
        if key in new:
            yield from _changes(value, new[key], f"{path}/{_escaped(key)}")
        else:
            yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
    for key, value in new.items():
        if key not in old:
            yield {"op": "add", "path": f"{path}/{_escaped(key)}", "value": value}


def _of_list(old: list[Any], new: list[Any], path: str) -> Iterator[Operation]:
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        yield from _changes(before, after, f"{path}/{index}")
    for index in range(len(old) - 1, len(new) - 1, -1):  # from the end: each removal moves what is behind it
        yield {"op": "remove", "path": f"{path}/{index}"}
    for item in new[len(old) :]:
        yield {"op": "add", "path": f"{path}/-", "value": item}


def _escaped(key: str) -> str:
    """Write a key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def write(folder: Path) -> None:
    """Write the files into `folder`, and remove those that are no longer made."""
    files = manifests()
    for part in ("base", "components", "overlays"):
        for path in sorted((folder / part).rglob("*.yaml")):
            if str(path.relative_to(folder)) not in files:
                path.unlink()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""The values of the Helm chart and their schema: the flags of `kvmesh install`, in camel case, with their help."""

import enum
import inspect
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from operate.install import commands

# what an option is that is no value: the release's own, Helm's own, or a list that values write as objects
NOT_VALUES = {
    "pool": "pools",
    "pool_selector": "pools[].selector",
    "gateway": "gateways",
    "hostname": "routes",
    "clients": "clients",
    "namespace": "helm --namespace",
    "create_namespace": "helm --create-namespace",
    "skip_crds": "helm --skip-crds",
    "dry_run": "helm template",
    "force_conflicts": "helm --force-conflicts",
    "wait_seconds": "helm --wait --timeout",
    "context": "helm --kube-context",
    "preflight": "only kvmesh install looks at the mesh first",
}
NEEDED = ("image", "istioVersion")  # Helm can neither find nor guess them
LISTS = {"image_pull_secret": "imagePullSecrets", "fetch_model": "fetchModels"}
LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
PORT = {"type": ["integer", "null"], "minimum": 1, "maximum": 65535}
SELECTOR = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}


HOST = r"^(\*|(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)$"
EMPTY = {"maxItems": 0}
SOME = {"minItems": 1}
NONE = {"type": "null"}


def _is(**given: Any) -> dict[str, Any]:
    return {"properties": {name: {"const": value} for name, value in given.items()}, "required": list(given)}


RULES = [
    {
        "if": _is(mode="sidecar"),
        "then": {"properties": {"clients": SOME, "gateways": EMPTY, "routes": EMPTY}},
        "else": {"properties": {"clients": EMPTY, "gateways": SOME}},
    },
    {
        "if": _is(mode="inferencepool"),
        "then": {
            "properties": {
                "routes": EMPTY,
                "failureMode": {"const": "FailClose"},  # the pool says it
                "bodyMode": {"type": "null"},
            }
        },
        "else": {"if": {"not": _is(mode="sidecar")}, "then": {"properties": {"routes": SOME}}},
    },
    {"if": _is(mode="ambient-gateway"), "then": {"not": _is(membership="sidecar")}},
    {
        "if": _is(failureMode="FailOpen"),
        "then": {"not": _is(bodyMode="duplex")},
    },
    {
        "if": {"properties": {"redis": {"type": "null"}}},
        "then": {
            "properties": {
                name: {"type": "null"} for name in ("redisSentinelPasswordSecret", "redisCaSecret", "redisTlsSecret")
            }
        },
        "else": {
            "properties": {
                "redis": {"pattern": r"^rediss?(\+sentinel|\+cluster)?://", "not": {"pattern": "@|password="}},
            }
        },
    },
    *(
        {
            "if": {"properties": {first: {"type": "string"}}, "required": [first]},
            "then": {"properties": dict.fromkeys(others, NONE)},
        }
        for first, others in (
            ("tokenizersClaim", ("modelCacheClaim", "tokenizersImage")),
            ("modelCacheClaim", ("tokenizersImage",)),
        )
    ),
    {
        "if": {"properties": {"fetchModels": EMPTY}},
        "then": {"properties": {"hubEndpoint": NONE, "hubTokenSecret": NONE}},
        "else": {"properties": {"tokenizersClaim": NONE, "tokenizersImage": NONE}},
    },
    {
        "if": _is(scope="namespaced"),
        "then": {"properties": {"rootNamespace": NONE}},
    },
]


def _options() -> Iterator[tuple[str, Any, Any, Any]]:
    """Return the options of `kvmesh install` that are values: name in values, type, default, OptionInfo."""
    hints = typing.get_type_hints(commands.install, include_extras=True)
    for name, parameter in inspect.signature(commands.install).parameters.items():
        if name in NOT_VALUES:
            continue
        kind, option = typing.get_args(hints[name])
        first, *rest = name.split("_")
        yield LISTS.get(name, first + "".join(part.capitalize() for part in rest)), kind, parameter.default, option


def values() -> str:
    """Return values.yaml: every value with its default and its flag's help."""
    lines = [
        "# Made by `python -m tools.helm_chart charts/kvmesh`: change operate/install/commands.py, not this.",
        "# The flags of `kvmesh install`, in camel case; docs/guides/helm.md has examples.",
        "",
        "# The pools: {namespace, name, port: 8000, podPort, selector: {LABEL: VALUE}, hasRule: whether people have a",
        "# DestinationRule for its Service}",
        "pools: []",
        "# Gateways whose pods are to ask: {namespace, name, selector: {LABEL: VALUE}, serviceAccount}",
        "gateways: []",
        "# Hosts of the gateways: {host, port, route, pool: NAMESPACE/NAME}",
        "routes: []",
        "# Client pods whose sidecars are to ask: {namespace, selector: {kvmesh.io/client: 'true'}}",
        "clients: []",
    ]
    for name, _, default, option in _options():
        lines.append(f"# {option.help}")
        lines.append(f"{name}: {'[]' if name in LISTS.values() else json.dumps(default)}")
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """Return values.schema.json: what `kvmesh install` would refuse, as far as a schema can see it."""
    properties: dict[str, Any] = {
        "global": {},  # Helm's own
        "pools": _listed(
            {"namespace": LABEL, "name": LABEL, "port": PORT, "podPort": PORT, "selector": SELECTOR}
            | {"hasRule": {"type": "boolean"}},
            needed=["namespace", "name"],
        )
        | {"minItems": 1},
        "gateways": _listed(
            {
                "namespace": LABEL,
                "name": {"type": "string"},
                "selector": SELECTOR,
                "serviceAccount": {"type": "string"},
            },
            needed=["namespace", "name"],
        ),
        "routes": _listed(
            {
                "host": {"type": "string", "pattern": HOST},
                "port": PORT,
                "route": {"type": ["string", "null"]},
                "pool": {"type": "string", "pattern": "^[^/]+/[^/]+$"},
            },
            needed=["host"],
        ),
        "clients": _listed({"namespace": LABEL, "selector": SELECTOR}, needed=["namespace"]),
    }
    for name, kind, _, option in _options():
        properties[name] = _type(kind, option) | {"description": option.help}
        if name in NEEDED:
            properties[name] |= {"type": "string", "minLength": 1}
        if name == "istioVersion":
            properties[name]["pattern"] = r"^1\.(2[89]|[3-9][0-9]|[1-9][0-9]{2})(\.[0-9]+)?(-[-a-zA-Z0-9_.]+)?$"
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart kvmesh",
        "type": "object",
        "additionalProperties": False,
        "required": ["pools", *NEEDED],
        "properties": properties,
        "allOf": RULES,
    }


def _listed(properties: dict[str, Any], *, needed: list[str]) -> dict[str, Any]:
    item = {"type": "object", "additionalProperties": False, "required": needed, "properties": properties}
    return {"type": "array", "items": item}


def _type(kind: Any, option: Any) -> dict[str, Any]:
    optional = isinstance(kind, types.UnionType)
    if optional:
        kind = next(each for each in typing.get_args(kind) if each is not types.NoneType)
    if typing.get_origin(kind) is list:
        return {"type": "array", "items": {"type": "string"}}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [each.value for each in kind] + [None] * optional}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    schema: dict[str, Any] = {"type": [names[kind], "null"] if optional else names[kind]}
    if option.min is not None:
        schema["minimum"] = option.min
    return schema

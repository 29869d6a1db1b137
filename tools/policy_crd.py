"""The CustomResourceDefinition of InferencePolicy, written from the declaration of its fields.

`python -m tools.policy_crd` prints it. Nothing else writes what is in manifests/crds; a test compares.
"""

import sys
from collections.abc import Mapping
from typing import Any

import yaml

from extproc.policy.inference_policy import GROUP, KIND, VERSION
from extproc.policy.schema import Choice, Flag, Kind, ListOf, Number, Property, Record, Rule, Text, kind_of
from extproc.policy.spec import Spec
from kvmesh.documents.documents import MOST_ANCESTORS

PLURAL, SINGULAR, SHORT_NAME, CATEGORY = "inferencepolicies", "inferencepolicy", "infpol", "kvmesh"
HEADER = "# Written by `python -m tools.policy_crd`; docs/reference/inference-policy.md explains the fields.\n"
INT32 = 2**31 - 1
CONDITION_COLUMN = '.status.ancestors[*].conditions[?(@.type=="{}")].{}'
# the API server shows the first of several: of an entry for each installation, the one that wrote first
COLUMNS: Mapping[str, str] = {
    "Target": ".spec.targetRefs[0].name",
    "Strategy": ".spec.scoring.strategy",
    "Accepted": CONDITION_COLUMN.format("Accepted", "status"),
    "Programmed": CONDITION_COLUMN.format("Programmed", "status"),
    "Reason": CONDITION_COLUMN.format("Programmed", "reason"),
    "Warning": CONDITION_COLUMN.format("Warning", "status"),
    "Tokens": CONDITION_COLUMN.format("ExactTokens", "reason"),
    "Shadow": CONDITION_COLUMN.format("Shadow", "status"),
    "Message": CONDITION_COLUMN.format("Programmed", "message"),
    "Failure": ".spec.failureMode",
    "Age": ".metadata.creationTimestamp",
}
WIDE = ("Shadow", "Message", "Failure")  # columns that only `kubectl get -o wide` shows


def policy_crd() -> dict[str, Any]:
    """Return the definition as a document of apiextensions.k8s.io/v1."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(name, path) for name, path in COLUMNS.items()],
        "schema": {"openAPIV3Schema": policy_schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            "labels": {"app.kubernetes.io/part-of": "kvmesh", "gateway.networking.k8s.io/policy": "Inherited"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": [CATEGORY],
            },
            "versions": [version],
        },
    }


def _column(name: str, path: str) -> dict[str, Any]:
    column = {"name": name, "type": "date" if name == "Age" else "string", "jsonPath": path}
    return column | ({"priority": 1} if name in WIDE else {})


def policy_schema() -> dict[str, Any]:
    """Return the structural schema of the resource."""
    return {
        "type": "object",
        "description": "How the endpoint picker routes requests to pools of LLM servers: for the mesh, a namespace, or"
        " what targetRefs name. The more specific policy wins, field by field.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _schema(kind_of(Spec)),
            "status": STATUS,
        },
    }


def document_text() -> str:
    """Return the definition as YAML."""
    return HEADER + yaml.dump(policy_crd(), Dumper=_Dumper, sort_keys=False, width=118, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def _schema(kind: Kind) -> dict[str, Any]:
    match kind:
        case Record():
            return _record(kind)
        case ListOf():
            return _list(kind)
        case Number():
            return _number(kind)
        case Flag():
            return {"type": "boolean"}
        case Text() | Choice():
            return _words(kind)


def _words(kind: Text | Choice) -> dict[str, Any]:
    if isinstance(kind, Choice):
        if isinstance(kind.of[0], int):
            return {"type": "integer", "format": "int32", "enum": list(kind.of)}
        return {"type": "string", "enum": [str(word) for word in kind.of], "maxLength": 64}
    found: dict[str, Any] = {"type": "string", "maxLength": kind.most}
    if kind.least:
        found["minLength"] = kind.least
    return found | ({"pattern": kind.pattern} if kind.pattern else {})


def _number(kind: Number) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer" if kind.whole else "number"}
    if kind.whole:
        found["format"] = "int32" if kind.most <= INT32 else "int64"
    found["minimum"] = _plain(kind.least)
    if kind.above:
        found["exclusiveMinimum"] = True
    found["maximum"] = _plain(kind.most)
    return found


def _plain(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _record(kind: Record) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object"}
    required = [name for name, prop in kind.properties.items() if prop.required]
    if required:
        found["required"] = required
    found["properties"] = {name: _property(prop) for name, prop in kind.properties.items()}
    return found | _rules(kind.rules)


def _property(prop: Property) -> dict[str, Any]:
    description = prop.description[:1].upper() + prop.description[1:]
    found = {
        "description": f"{description} (default: {prop.default})." if prop.default else f"{description}.",
        **_schema(prop.kind),
    }
    if prop.filled is None:
        return found
    return found | {"default": prop.filled if isinstance(prop.filled, str) else _plain(prop.filled)}


def _list(kind: ListOf) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "array", "maxItems": kind.most}
    if kind.least:
        found["minItems"] = kind.least
    if kind.keys:
        found |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(kind.keys)}
    else:
        found["x-kubernetes-list-type"] = "set" if kind.unique else "atomic"
    return found | {"items": _schema(kind.item)} | _rules(kind.rules)


def _rules(rules: tuple[Rule, ...]) -> dict[str, Any]:
    if not rules:
        return {}
    return {"x-kubernetes-validations": [{"rule": rule.cel, "message": rule.message} for rule in rules]}


CONDITION = {
    "type": "object",
    "required": ["type", "status", "reason", "message", "lastTransitionTime"],
    "properties": {
        "type": {"type": "string", "maxLength": 316},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "reason": {
            "type": "string",
            "minLength": 1,
            "maxLength": 1024,
            "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        },
        "message": {"type": "string", "maxLength": 32768},
    },
}
ANCESTOR_REF: Mapping[str, Any] = {
    "type": "object",
    "description": "The picker's Service: it stands for the installation.",
    "required": ["name"],
    "properties": {
        "group": {"type": "string", "maxLength": 253},
        "kind": {"type": "string", "maxLength": 63},
        "namespace": {"type": "string", "maxLength": 63},
        "name": {"type": "string", "minLength": 1, "maxLength": 253},
    },
}
ANCESTOR: Mapping[str, Any] = {
    "type": "object",
    "description": "What one installation makes of the policy: PolicyAncestorStatus of Gateway API (GEP-713).",
    "required": ["ancestorRef", "controllerName", "conditions"],
    "properties": {
        "ancestorRef": ANCESTOR_REF,
        "controllerName": {
            "type": "string",
            "description": "The installation that wrote this entry, as kvmesh.io/picker/NAMESPACE.",
            "minLength": 1,
            "maxLength": 253,
        },
        "conditions": {
            "type": "array",
            "maxItems": 8,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": CONDITION,
        },
        "hosts": {
            "type": "array",
            "description": "The claimed hosts: whether their requests go to the policy's pool. The first claim wins.",
            "maxItems": 32,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": {
                "type": "object",
                "required": ["name", "inForce"],
                "properties": {"name": {"type": "string", "maxLength": 253}, "inForce": {"type": "boolean"}},
            },
        },
    },
}
STATUS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "ancestors": {
            "type": "array",
            "maxItems": MOST_ANCESTORS,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["controllerName"],
            "items": ANCESTOR,
        },
    },
}

if __name__ == "__main__":
    sys.stdout.write(document_text())

"""The resource that the contract's tests use: one field for each thing that a schema can demand."""

from typing import Any

from tests.kube_api.errors import Document

_PART: Document = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "weight": {"type": "number", "default": 0.5, "minimum": 0, "maximum": 1},
    },
}
_SPEC: Document = {
    "type": "object",
    "x-kubernetes-validations": [
        {
            "rule": "!has(self.least) || !has(self.most) || self.least <= self.most",
            "message": "least must not be above most",
        },
        {"rule": "!has(self.__namespace__) || self.__namespace__ != 'kube-system'", "message": "not there"},
    ],
    "properties": {
        "size": {"type": "integer", "default": 1, "minimum": 1, "maximum": 100},
        "mode": {"type": "string", "enum": ["Fast", "Slow"], "default": "Fast"},
        "title": {"type": "string", "maxLength": 10},
        "code": {"type": "string", "maxLength": 10, "pattern": "^[a-z]+$"},
        "least": {"type": "number"},
        "most": {"type": "number"},
        "namespace": {"type": "string", "maxLength": 63},
        "wait": {
            "type": "string",
            "maxLength": 20,
            "x-kubernetes-validations": [
                {"rule": "duration(self) >= duration('1ms')", "message": "wait must be at least 1ms"}
            ],
        },
        "fixed": {
            "type": "string",
            "maxLength": 10,
            "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "fixed cannot change"}],
        },
        "labels": {
            "type": "object",
            "maxProperties": 8,
            "additionalProperties": {"type": "string", "maxLength": 63},
            "x-kubernetes-validations": [
                {"rule": "self.all(key, !key.contains('*'))", "message": "no wildcards"},
            ],
        },
        "parts": {
            "type": "array",
            "maxItems": 8,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": _PART,
            "x-kubernetes-validations": [
                {
                    "rule": "self.exists(part, part.weight >= 0.5) || self.size() > 1",
                    "message": "the weights sum up to less than a half",
                }
            ],
        },
    },
}

DEFINITION: Document = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "widgets.contract.kvmesh.io"},
    "spec": {
        "group": "contract.kvmesh.io",
        "scope": "Namespaced",
        "names": {"kind": "Widget", "plural": "widgets", "singular": "widget", "shortNames": ["wdg"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "additionalPrinterColumns": [
                    {"name": "Size", "type": "integer", "jsonPath": ".spec.size", "priority": 0},
                    {"name": "First part", "type": "string", "jsonPath": ".spec.parts[0].name"},
                ],
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": _SPEC,
                            "status": {"type": "object", "properties": {"phase": {"type": "string"}}},
                        },
                    }
                },
            }
        ],
    },
}


def widget(
    name: str, *, labels_of_object: dict[str, str] | None = None, finalizers: list[str] | None = None, **spec: Any
) -> Document:
    """A valid one, but for what `spec` changes."""
    metadata: Document = {"name": name}
    if labels_of_object is not None:
        metadata["labels"] = labels_of_object
    if finalizers is not None:
        metadata["finalizers"] = finalizers
    return {
        "apiVersion": "contract.kvmesh.io/v1",
        "kind": "Widget",
        "metadata": metadata,
        "spec": {"size": 1, "parts": [{"name": "x"}], **spec},
    }

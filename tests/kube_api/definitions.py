"""CustomResourceDefinitions: what makes one acceptable, and the status of an accepted one."""

import re
from collections.abc import Iterator
from typing import Any

from tests.kube_api.cel_parser import CelSyntaxError, parse
from tests.kube_api.cel_rules import compiled
from tests.kube_api.cel_types import RULE_LIMIT, CelTypeError, check, times_asked, type_of
from tests.kube_api.errors import Cause, Document, invalid
from tests.kube_api.schema_validation import validate
from tests.kube_api.structural import prune

_GROUP = "apiextensions.k8s.io"
_FORBIDDEN = (
    "$ref",
    "definitions",
    "dependencies",
    "deprecated",
    "discriminator",
    "id",
    "patternProperties",
    "readOnly",
)


def accept_definition(document: Document, timestamp: str) -> Document:
    """The definition with its names filled in and its status as after the server's controllers have seen it."""
    causes = list(definition_causes(document))
    if causes:
        raise invalid(_GROUP, "CustomResourceDefinition", document["metadata"]["name"], causes)
    spec = document["spec"]
    names = spec["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", names["kind"] + "List")
    spec.setdefault("conversion", {"strategy": "None"})
    storage = next(version["name"] for version in spec["versions"] if version.get("storage"))
    known = document.get("status") or {}
    conditions = known.get("conditions") or [
        _condition("NamesAccepted", "NoConflicts", "no conflicts found", timestamp),
        _condition("Established", "InitialNamesAccepted", "the initial names have been accepted", timestamp),
    ]
    stored = list(dict.fromkeys([*known.get("storedVersions", ()), storage]))
    document["status"] = {"acceptedNames": names, "conditions": conditions, "storedVersions": stored}
    return document


def _condition(kind: str, reason: str, message: str, timestamp: str) -> Document:
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": timestamp}


def definition_causes(document: Document) -> Iterator[Cause]:
    """What is wrong with a definition: names, versions, schemas that are not structural, rules that are no CEL."""
    spec: Any = document.get("spec") or {}
    names = spec.get("names") or {}
    for path, value in (("spec.group", spec.get("group")), ("spec.names.plural", names.get("plural"))):
        if not value:
            yield Cause(path, "FieldValueRequired", "Required value")
    if not names.get("kind"):
        yield Cause("spec.names.kind", "FieldValueRequired", "Required value")
    if spec.get("scope") not in {"Cluster", "Namespaced"}:
        shown = f'Unsupported value: "{spec.get("scope", "")}": supported values: "Cluster", "Namespaced"'
        yield Cause("spec.scope", "FieldValueNotSupported", shown)
    name = document["metadata"]["name"]
    if name != f"{names.get('plural')}.{spec.get('group')}":
        text = f'Invalid value: "{name}": must be spec.names.plural+"."+spec.group'
        yield Cause("metadata.name", "FieldValueInvalid", text)
    versions = spec.get("versions") or []
    if sum(bool(version.get("storage")) for version in versions) != 1:
        text = "Invalid value: must have exactly one version marked as storage version"
        yield Cause("spec.versions", "FieldValueInvalid", text)
    for index, version in enumerate(versions):
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        path = f"spec.versions[{index}].schema.openAPIV3Schema"
        if schema is None:
            yield Cause(path, "FieldValueRequired", "Required value: schemas are required")
        else:
            yield from _structural(schema, path, root=True)


def _structural(schema: Document, path: str, *, times: float | None = 1, root: bool = False) -> Iterator[Cause]:
    for word in _FORBIDDEN:
        if word in schema:
            yield Cause(f"{path}.{word}", "FieldValueForbidden", "Forbidden: " + word + " is not supported")
    yield from _typed(schema, path, root=root)
    yield from _listed(schema, path)
    if "default" in schema:
        yield from _defaulted(schema, path)
    if "pattern" in schema:
        yield from _pattern(schema["pattern"], path)
    yield from _rules(schema, path, times, root=root)
    for name, inner in schema.get("properties", {}).items():
        yield from _structural(inner, f"{path}.properties[{name}]", times=times)
    for word, limit in (("items", "maxItems"), ("additionalProperties", "maxProperties")):
        if isinstance(schema.get(word), dict):
            more = None if times is None or limit not in schema else times * schema[limit]
            yield from _structural(schema[word], f"{path}.{word}", times=more)


def _typed(schema: Document, path: str, *, root: bool) -> Iterator[Cause]:
    free = schema.get("x-kubernetes-int-or-string") or schema.get("x-kubernetes-preserve-unknown-fields")
    if not schema.get("type") and (root or not free):
        yield Cause(
            f"{path}.type", "FieldValueRequired", "Required value: must not be empty for specified object fields"
        )
    if root and schema.get("type") not in {None, "object"}:
        text = f'Invalid value: "{schema["type"]}": must be object at the root'
        yield Cause(f"{path}.type", "FieldValueInvalid", text)
    if schema.get("properties") and schema.get("additionalProperties"):
        text = "Forbidden: additionalProperties and properties are mutual exclusive"
        yield Cause(f"{path}.additionalProperties", "FieldValueForbidden", text)
    if schema.get("type") == "array" and not isinstance(schema.get("items"), dict):
        yield Cause(f"{path}.items", "FieldValueRequired", "Required value: must be specified")


def _listed(schema: Document, path: str) -> Iterator[Cause]:
    kind, keys = schema.get("x-kubernetes-list-type"), schema.get("x-kubernetes-list-map-keys") or []
    if kind is not None and kind not in {"atomic", "set", "map"}:
        text = f'Unsupported value: "{kind}": supported values: "atomic", "map", "set"'
        yield Cause(f"{path}.x-kubernetes-list-type", "FieldValueNotSupported", text)
    if kind == "map" and not keys:
        text = "Required value: must not be empty if x-kubernetes-list-type is map"
        yield Cause(f"{path}.x-kubernetes-list-map-keys", "FieldValueRequired", text)
    items = schema.get("items") if isinstance(schema.get("items"), dict) else {}
    for key in keys if kind == "map" else ():
        inner = (items or {}).get("properties", {}).get(key)
        if inner is None or ("default" not in inner and key not in (items or {}).get("required", ())):
            text = (
                "Required value: this property is in x-kubernetes-list-map-keys, so it must have a default or be a "
                "required property"
            )
            yield Cause(f"{path}.items.properties[{key}].default", "FieldValueRequired", text)


def _defaulted(schema: Document, path: str) -> Iterator[Cause]:
    _, unknown = prune(schema, schema["default"])
    if unknown:
        text = "Invalid value: must not have fields that the schema does not know: " + ", ".join(unknown)
        yield Cause(f"{path}.default", "FieldValueInvalid", text)
    yield from validate(schema, schema["default"], f"{path}.default")


def _pattern(pattern: str, path: str) -> Iterator[Cause]:
    try:
        re.compile(pattern)
    except re.error as problem:
        yield Cause(
            f"{path}.pattern",
            "FieldValueInvalid",
            f'Invalid value: "{pattern}": must be a valid regular expression: {problem}',
        )
    if re.search(r"\(\?[=!<]|\\[1-9]", pattern):
        text = f'Invalid value: "{pattern}": must be a regular expression of Go: no look-around, no back-references'
        yield Cause(f"{path}.pattern", "FieldValueInvalid", text)


def _rules(schema: Document, path: str, times: float | None, *, root: bool) -> Iterator[Cause]:
    for index, rule in enumerate(schema.get("x-kubernetes-validations", ())):
        at = f"{path}.x-kubernetes-validations[{index}]"
        for word in ("rule", "messageExpression"):
            text = rule.get(word)
            if text is None:
                continue
            try:
                compiled(text)
            except ValueError as problem:
                yield Cause(
                    f"{at}.{word}", "FieldValueInvalid", f'Invalid value: "{text}": compilation failed: {problem}'
                )
                continue
            for wrong in _misread(schema, text, times, root=root):
                yield Cause(f"{at}.{word}", "FieldValueInvalid", f'Invalid value: "{text}": {wrong}')
        if not rule.get("rule"):
            yield Cause(f"{at}.rule", "FieldValueRequired", "Required value: rule is required")
        if "\n" in rule.get("rule", "") and not rule.get("message") and not rule.get("messageExpression"):
            yield Cause(
                f"{at}.message",
                "FieldValueRequired",
                "Required value: message must be specified if rule contains line breaks",
            )
        if "\n" in rule.get("message", ""):
            yield Cause(f"{at}.message", "FieldValueInvalid", "Invalid value: message must not contain line breaks")


def _misread(schema: Document, text: str, times: float | None, *, root: bool) -> Iterator[str]:
    """What the server's compiler finds before a rule ever runs: types that do not fit, and what costs too much."""
    named = type_of(schema)
    if root:
        text_type: Document = {"type": "string", "maxLength": 253}
        metadata = {"type": "object", "properties": {"name": text_type, "generateName": text_type}}
        own = {"apiVersion": text_type, "kind": text_type, "metadata": metadata}
        named = type_of({**schema, "properties": {**schema.get("properties", {}), **own}})
    try:
        checked = check(parse(text), {"self": named, "oldSelf": named})
    except CelSyntaxError:
        return  # cel has compiled it: syntax that only our parser lacks
    except CelTypeError as problem:
        yield f"compilation failed: ERROR: {problem}"
        return
    factor = checked.cost * times_asked(schema, times) / RULE_LIMIT
    if factor > 1:
        yield (
            f"estimated rule cost exceeds budget by factor of {factor:.1f}x (try simplifying the rule, or adding "
            "maxItems, maxProperties, and maxLength where arrays, maps, and strings are declared)"
        )

"""Every rendered object is what its API takes: no unknown field, no wrong type. Schemas in tests/data/crds."""

from pathlib import Path
from typing import Any

import jsonschema
import lightkube.codecs
import pytest
import yaml

from operate.install.render import render
from operate.install.shipped_files import read_crds
from tests.unit.operate_install.sample_plans import every_plan

CRDS = Path(__file__).parents[2] / "data" / "crds" / "istio.yaml"
PLANS = every_plan()


def strict(schema: Any) -> Any:
    """The same schema, without room for fields that it does not know."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(value) for name, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and not open_ended and schema.get("type") == "object":
        closed["additionalProperties"] = False
    return closed


def istio_schemas() -> dict[str, Any]:
    schemas = {}
    for crd in yaml.safe_load_all(CRDS.read_text(encoding="utf-8")):
        [version] = crd["spec"]["versions"]
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"] |= {key: {} for key in ("apiVersion", "kind", "metadata")}
        schemas[f"{crd['spec']['group']}/{version['name']} {crd['spec']['names']['kind']}"] = schema
    return schemas


VALIDATORS = {name: jsonschema.Draft7Validator(schema) for name, schema in istio_schemas().items()}


def problems(document: dict[str, Any]) -> list[str]:
    """What its schema has against a document."""
    name = f"{document['apiVersion']} {document['kind']}"
    if name in VALIDATORS:
        return [f"{name} {error.json_path}: {error.message}" for error in VALIDATORS[name].iter_errors(document)]
    if document["kind"] in {"ServiceMonitor", "PrometheusRule"}:
        return []  # the operator's CRDs are not at hand
    typed: Any = lightkube.codecs.from_dict(document)
    kept = typed.to_dict()
    return [] if kept == document else [f"{name} {document['metadata']['name']}: {difference(document, kept)}"]


def difference(wanted: Any, kept: Any, path: str = "") -> str:
    """Where the API's own types lose something."""
    if isinstance(wanted, dict) and isinstance(kept, dict):
        for key, value in wanted.items():
            if key not in kept:
                return f"{path}.{key} is unknown"
            if kept[key] != value:
                return difference(value, kept[key], f"{path}.{key}")
    if isinstance(wanted, list) and isinstance(kept, list):
        for index, (left, right) in enumerate(zip(wanted, kept, strict=False)):
            if left != right:
                return difference(left, right, f"{path}[{index}]")
    return f"{path}: {wanted!r} became {kept!r}"


@pytest.mark.parametrize("name", list(PLANS))
def test_every_rendered_object_fits_its_schema(name: str) -> None:
    assert [problem for each in render(PLANS[name]) for problem in problems(each)] == []


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("EnvoyFilter", ("spec", "priorty"), 100),
        ("EnvoyFilter", ("spec", "configPatches", 0, "applyTo"), "HTTP_FILTERS"),
        ("DestinationRule", ("spec", "trafficPolicy", "loadBalancer", "simple"), "PASS_THROUGH"),
        ("PeerAuthentication", ("spec", "mtls", "mode"), "strict"),
        ("AuthorizationPolicy", ("spec", "rules", 0, "form"), []),
        ("Deployment", ("spec", "template", "spec", "containers", 0, "enviroment"), []),
        ("NetworkPolicy", ("spec", "ingres"), []),
    ],
)
def test_a_mistake_would_be_noticed(kind: str, path: tuple[Any, ...], value: Any) -> None:
    document = next(each for each in render(PLANS["1.28 gateway"]) if each["kind"] == kind)
    copied = yaml.safe_load(yaml.safe_dump(document))
    place = copied
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert problems(document) == []
    assert len(problems(copied)) == 1


def test_the_crds_are_installed_along_and_can_be_found_again() -> None:
    documents = render(PLANS["1.28 gateway"], crds=read_crds())
    names = [each["metadata"]["name"] for each in documents if each["kind"] == "CustomResourceDefinition"]
    assert names == ["inferencepolicies.kvmesh.io"]
    assert documents[0]["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "kvmesh-install"
    assert "kvmesh.io/installation" not in documents[0]["metadata"]["labels"]  # of all installations of the cluster

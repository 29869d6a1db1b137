"""The Helm chart's values are the options of `kvmesh install`, with the same defaults."""

import inspect
import json
from pathlib import Path
from typing import Any

import yaml

from operate.install import commands
from operate.install.shipped_files import CRDS

CHART = Path(__file__).parents[3] / "charts/kvmesh"
NOT_VALUES = {  # options that are Helm's own, or lists that values write as objects
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
LISTS = {"image_pull_secret": "imagePullSecrets", "fetch_model": "fetchModels"}


def test_every_option_is_a_value_with_the_same_default() -> None:
    options = {
        LISTS.get(name, camel_case(name)): [] if name in LISTS else parameter.default
        for name, parameter in inspect.signature(commands.install).parameters.items()
        if name not in NOT_VALUES
    }
    values = chart_values()
    assert {name: values.get(name, "missing") for name in options} == json.loads(json.dumps(options))


def test_every_value_is_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert schema["properties"].keys() - {"global"} == chart_values().keys()


def test_the_chart_has_the_definitions_that_install_applies() -> None:
    assert sorted(path.name for path in (CHART / "crds").iterdir()) == sorted(CRDS)


def camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def chart_values() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return values

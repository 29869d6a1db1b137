"""What the chart's tests share: Helm itself, values as flags of `kvmesh install`, and objects to compare."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.mesh.go_programs import go_program

CHART = Path(__file__).parents[2] / "charts/kvmesh"
RELEASE = "kvmesh"
DEADLINE_SECONDS = 300.0
Document = dict[str, Any]


def helm(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run Helm and return what it prints. Raise AssertionError, with its words, where it fails."""
    done = run_helm(*arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_helm(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm."""
    return subprocess.run(
        [str(go_program("helm")), *arguments],
        env=environment and dict(environment),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


def objects(text: str) -> dict[tuple[str, str, str], Document]:
    """Return the objects of a YAML stream by kind, namespace and name; files of JSON in them as what they say."""
    found = {}
    for document in yaml.load_all(text, Loader=yaml.CSafeLoader):
        if document is None:
            continue
        meta = document["metadata"]
        if document["kind"] == "ConfigMap":
            document["data"] = {name: json.loads(value) for name, value in document["data"].items()}
        key = (document["kind"], meta.get("namespace", ""), meta["name"])
        assert key not in found, f"twice: {key}"
        found[key] = document
    return found


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Write values as the flags of `kvmesh install` that say the same."""
    flags = []
    for pool in values["pools"]:
        ports = f":{pool.get('port', 8000)}" + (f":{pool['podPort']}" if "podPort" in pool else "")
        identity = f"{pool['namespace']}/{pool['name']}"
        flags += ["--pool", identity + ports]
        if "selector" in pool:
            flags += ["--pool-selector", f"{identity}={_labels(pool['selector'])}"]
    for gateway in values.get("gateways", ()):
        labels = "@" + _labels(gateway["selector"]) if "selector" in gateway else ""
        account = "@" + gateway["serviceAccount"] if "serviceAccount" in gateway else ""
        flags += ["--gateway", f"{gateway['namespace']}/{gateway['name']}{labels}{account}"]
    for route in values.get("routes", ()):
        port = f":{route['port']}" if "port" in route else ""
        single = f"/{route['route']}" if "route" in route else ""
        pool_name = f"={route['pool']}" if "pool" in route else ""
        flags += ["--hostname", route["host"] + port + single + pool_name]
    for clients in values.get("clients", ()):
        labels = "@" + _labels(clients["selector"]) if "selector" in clients else ""
        flags += ["--clients", clients["namespace"] + labels]
    for name, value in values.items():
        if name not in ("pools", "gateways", "routes", "clients"):
            flags += _flag(name, value)
    return flags


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + "".join(f"-{each.lower()}" if each.isupper() else each for each in name)
    if name == "poolsInMesh":
        return ["--pools-in-mesh" if value else "--pools-outside-mesh"]
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [part for each in value for part in (flag.removesuffix("s"), each)]
    return [flag, str(value)]


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())

"""`kubectl kustomize` of every overlay gives what `kvmesh install` renders for the same choices."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from operate.install.render import render
from operate.install.shipped_files import read_crds
from tools.kustomize_tree import AXES, HEADER, OVERLAYS, overlay_plan

FOLDER = Path(__file__).parents[3] / "manifests"
KUBECTL = shutil.which("kubectl")
COMBINED = {"istio": "1.28-sidecar", "scope": "namespaced", "redis": "sentinel", "monitoring": "prometheus-operator"}

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not on this machine")


def built(folder: Path) -> list[dict[str, Any]]:
    assert KUBECTL is not None
    command = [KUBECTL, "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def by_key(documents: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): sorted_settings(each)
        for each in documents
    }


def sorted_settings(document: dict[str, Any]) -> dict[str, Any]:
    """The same object, its containers' settings by name: in which order they are set means nothing."""
    if document["kind"] == "Deployment":
        for container in document["spec"]["template"]["spec"]["containers"]:
            container["env"].sort(key=lambda each: each["name"])
    return document


@pytest.mark.parametrize("name", list(OVERLAYS))
def test_an_overlay_is_what_the_command_renders(name: str) -> None:
    expected = by_key(render(overlay_plan(OVERLAYS[name]), crds=read_crds()))
    assert by_key(built(FOLDER / "overlays" / name)) == expected


def test_components_of_all_choices_can_be_combined(tmp_path: Path) -> None:
    folder = tmp_path / "manifests"
    shutil.copytree(FOLDER, folder)
    overlay = folder / "overlays" / "mine"
    overlay.mkdir()
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../../base"],
        "components": [f"../../components/{axis}-{COMBINED[axis]}" for axis in AXES],
    }
    (overlay / "kustomization.yaml").write_text(HEADER + yaml.safe_dump(content), encoding="utf-8")
    assert by_key(built(overlay)) == by_key(render(overlay_plan(COMBINED), crds=read_crds()))

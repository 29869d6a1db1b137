"""kube-score's checks of every installation; what it finds nevertheless is here, each with its reason."""

import json
import random
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from operate.install.commands import app
from tests.mesh.chart import flags_of
from tests.mesh.go_programs import go_program
from tests.mesh.test_chart import BASE, VARIANTS, drawn

DEADLINE_SECONDS = 60.0
BEST = 10
ACCEPTED = {
    # a picker at its limit stands still for a part of each 100 ms, and every request with it
    ("container-resources", "CPU limit is not set"),
    # the image has a version, and a node without the registry can start what it has
    ("container-image-pull-policy", "ImagePullPolicy is not set to Always"),
    # topologySpreadConstraints do it, and one node is enough
    ("deployment-has-host-podantiaffinity", "Deployment does not have a host podAntiAffinity set"),
    # all that they write has a limit: emptyDirs theirs, logs the kubelet's
    ("container-ephemeral-storage-request-and-limit", "Ephemeral Storage limit is not set"),
    ("container-ephemeral-storage-request-and-limit", "Ephemeral Storage request is not set"),
    # Redis answers a PING or is of no use; the liveness probe has twelve times as much patience
    ("pod-probes-identical", "Container has the same readiness and liveness probe"),
    # one replica, which nobody names by its own name
    ("statefulset-has-servicename", "StatefulSet does not have a valid serviceName"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_an_installation_passes(name: str, tmp_path: Path) -> None:
    assert found(BASE | VARIANTS[name], tmp_path) == set()


@pytest.mark.parametrize("seed", range(10))
def test_any_installation_passes(seed: int, tmp_path: Path) -> None:
    assert found(drawn(random.Random(seed)), tmp_path) == set()


def found(values: Mapping[str, Any], folder: Path) -> set[tuple[str, str, str]]:
    """Return object, check and finding of what is neither accepted nor chosen by the values."""
    rendered = CliRunner().invoke(app, ["install", "--dry-run", *flags_of(values)])
    assert rendered.exit_code == 0, rendered.output
    path = folder / "install.yaml"
    path.write_text(rendered.stdout, encoding="utf-8")
    assert any(document["kind"] == "Deployment" for document in yaml.load_all(rendered.stdout, yaml.CSafeLoader))
    done = subprocess.run(
        [str(go_program("kube-score")), "score", "--output-format", "json", str(path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    return {
        (scored["object_name"], check["check"]["id"], comment["summary"])
        for scored in json.loads(done.stdout)
        for check in scored["checks"]
        if check["grade"] < BEST and not check["skipped"]
        for comment in check["comments"] or ()
        if not is_accepted(scored["object_name"], check["check"]["id"], comment, values)
    }


def is_accepted(name: str, check: str, comment: Mapping[str, str], values: Mapping[str, Any]) -> bool:
    if check == "service-targets-pod":
        return name.endswith("-pods")  # vLLM's pods are not installed here
    if check == "container-security-context-user-group-id":
        # the platform chooses the user, or the mesh: before its proxy starts, only this user's traffic passes
        return values.get("runAsUser") is False or comment["path"] == "fetch-models"
    if check == "deployment-replicas":
        return values.get("indexerReplicas") == 1
    return (check, comment["summary"]) in ACCEPTED

"""The objects that the guide shows for other gateways are accepted by their definitions, on a real API server."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.mesh.chart import helm
from tests.mesh.kube import Kube

GUIDE = Path(__file__).parents[2] / "docs/guides/other-gateways.md"
ENVOY_GATEWAY = "github.com/envoyproxy/gateway@v1.9.1"
DOWNLOAD_SECONDS = 300.0


@pytest.fixture(scope="module", autouse=True)
def _definitions(kube: Kube) -> None:
    downloaded = subprocess.run(
        ["go", "mod", "download", "-json", ENVOY_GATEWAY],
        cwd=kube.folder,
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_SECONDS,
        check=True,
    )
    chart = Path(json.loads(downloaded.stdout)["Dir"]) / "charts/gateway-crds-helm"
    definitions = helm("template", "eg", str(chart), "--set", "crds.envoyGateway.enabled=true")
    kube.kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=definitions)
    kube.define("inference")
    kube.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}} for n in ("llm", "kvmesh-system")))


@pytest.mark.parametrize("kind", ["EnvoyExtensionPolicy", "InferencePool"])
def test_what_the_guide_shows_is_accepted(kube: Kube, kind: str) -> None:
    [shown] = [each for each in _shown() if f"kind: {kind}\n" in each]
    said = kube.kubectl("apply", "--dry-run=server", "--validate=strict", "--filename=-", stdin=shown)
    assert said.count("(server dry run)") == shown.count("apiVersion:")
    assert "Warning" not in said


def test_a_misspelt_field_would_not_be(kube: Kube) -> None:
    [shown] = [each for each in _shown() if "endpointOverride" in each]
    wrong = shown.replace("endpointOverride", "hostOverride")
    said = kube.kubectl("apply", "--dry-run=server", "--validate=strict", "--filename=-", stdin=wrong, check=False)
    assert "unknown field" in said


def _shown() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)

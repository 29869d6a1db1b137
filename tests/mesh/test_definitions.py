"""The definitions that we ship, or test with, on a real API server: it says whether schemas and rules are right."""

from pathlib import Path

import pytest

from tests.mesh.kube import Kube

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "manifests/crds").glob("*.yaml"), *(ROOT / "tests/data/crds").glob("*.yaml")]


@pytest.mark.parametrize("path", sorted(path for path in FILES if path.stem != "kustomization"), ids=lambda p: p.stem)
def test_the_server_takes_every_definition_that_we_ship_or_test_with(kube: Kube, path: Path) -> None:
    """Structural schemas, rules that compile and stay within the server's budget; without a warning."""
    dry_run = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    printed = kube.kubectl(*dry_run, f"--filename={path}").splitlines()
    assert printed, path
    assert [line for line in printed if not line.endswith("serverside-applied (server dry run)")] == []

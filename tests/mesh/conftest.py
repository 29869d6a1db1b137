"""The real control planes that tests share."""

from collections.abc import Iterator

import pytest

from tests.mesh.kube import Kube, kube_in_background


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A Kubernetes control plane with Istio's definitions; it ends with the tests."""
    with kube_in_background(tmp_path_factory.mktemp("kube")) as running:
        running.define("istio")
        yield running

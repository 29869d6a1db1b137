"""`kvmesh install` looks at the volume of tokenizer folders before it applies anything, on real API servers."""

from collections.abc import Iterator

import pytest

from tests.mesh.kube import Kube, kube_in_background
from tests.mesh.mesh_objects import kubernetes_object, namespace
from tests.mesh.site import Site, made_site

IMAGE = "--tokenizers-image=r.example/t:1"


@pytest.fixture(scope="module")
def without_image_volumes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """An API server with the features of Kubernetes 1.34, of which ImageVolume is off by default."""
    with kube_in_background(tmp_path_factory.mktemp("kube"), emulates="1.34") as running:
        running.define("istio", "gateway")
        yield running


def test_an_api_server_that_leaves_the_image_out_is_told_before_anything_is_applied(
    without_image_volumes: Kube,
) -> None:
    with made_site(without_image_volumes) as site:
        done = site.install(IMAGE)
        assert done.code == 2, done.printed
        assert "the API server leaves volumes of images out of pods" in done.errors
        assert site.left() == []

        forced = site.install(IMAGE, "--no-preflight", "--wait-seconds=0")
        assert forced.code == 0, forced.errors
        assert "the API server has left the image out of the pickers' volume" in forced.printed


def test_a_claim_that_one_pod_alone_can_have_is_told_before_anything_is_applied(site: Site) -> None:
    spec = {"accessModes": ["ReadWriteOncePod"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = kubernetes_object("v1", "PersistentVolumeClaim", site.namespace, "cache", spec=spec)
    site.kube.apply(namespace(site.namespace), claim)

    done = site.install("--fetch-model=org/a", "--model-cache-claim=cache")
    assert done.code == 2, done.printed
    assert "--model-cache-claim cache: it is ReadWriteOncePod: one pod alone can have it" in done.errors
    assert site.left() == []


def test_a_claim_that_is_not_there_is_said(site: Site) -> None:
    done = site.install("--tokenizers-claim=folders", "--wait-seconds=0")
    assert f"there is no such PersistentVolumeClaim in namespace {site.namespace} now" in done.printed, done.errors

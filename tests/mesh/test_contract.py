"""The real API server keeps the contract that the API server of the other tests is held to."""

import copy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from tests.kube_api.contract import CRDS, KubernetesContract
from tests.kube_api.errors import Document
from tests.kube_api.policy_contract import PolicyContract
from tests.kube_api.rest import Rest, rest
from tests.mesh.kube import Kube

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def real(kube: Kube) -> AsyncIterator[Rest]:
    async with rest(kube.server, tls=kube.admin_tls()) as client:
        yield client


class TestContractOfTheRealServer(KubernetesContract, PolicyContract):
    @pytest.fixture
    async def rest(self, real: Rest) -> Rest:
        return real


def definitions() -> Iterator[pytest.ParameterSet]:
    """Every definition that we ship or test with."""
    for path in sorted([*(ROOT / "manifests/crds").glob("*.yaml"), *(ROOT / "tests/data/crds").glob("*.yaml")]):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document.get("kind") == "CustomResourceDefinition":
                yield pytest.param(document, id=document["metadata"]["name"])


@pytest.mark.parametrize("definition", list(definitions()))
async def test_every_definition_that_we_ship_or_test_with_is_taken(real: Rest, definition: Document) -> None:
    wanted = copy.deepcopy(definition)
    path = f"{CRDS}/{definition['metadata']['name']}"
    present = await real.ask("GET", path)
    if present.code == 200:
        wanted["metadata"]["resourceVersion"] = present.version
        answer = await real.ask("PUT", f"{path}?dryRun=All&fieldValidation=Strict", wanted)
    else:
        answer = await real.ask("POST", f"{CRDS}?dryRun=All&fieldValidation=Strict", wanted)
    assert answer.code in {200, 201}, answer.document

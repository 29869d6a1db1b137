"""The API server for tests keeps the contract that tests/mesh and tests/cluster ask of real ones."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kube_api import kube_api
from tests.kube_api.contract import KubernetesContract
from tests.kube_api.policy_contract import PolicyContract
from tests.kube_api.rest import Rest, rest


class TestContractOfTheTestServer(KubernetesContract, PolicyContract):
    mutations = 50  # both sides are the same code here

    @pytest.fixture
    async def rest(self, tmp_path: Path) -> AsyncIterator[Rest]:
        async with kube_api(tmp_path) as api, rest(api.url) as client:
            yield client

"""The contract of `tests/kube_api` on the real API server: what the emulation does, this one does too."""

from collections.abc import AsyncIterator

import pytest

from tests.kube_api.contract import KubernetesContract
from tests.kube_api.policy_contract import PolicyContract
from tests.kube_api.rest import Rest, rest
from tests.mesh.kube import Kube


class TestContractOfARealApiServer(KubernetesContract, PolicyContract):
    @pytest.fixture
    async def rest(self, kube: Kube) -> AsyncIterator[Rest]:
        async with rest(kube.server, tls=kube.tls) as client:
            yield client

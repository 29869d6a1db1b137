"""The contract against a real cluster: run where KUBECONFIG is set and you may make namespaces and definitions.

It shows that the API server of the other tests behaves as the real one. What it makes, it takes away again.
"""

import os
import re
import select
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.kube_api.contract import KubernetesContract
from tests.kube_api.policy_contract import PolicyContract
from tests.kube_api.rest import Rest, rest

PROXY_SECONDS = 15.0
KUBECTL = shutil.which("kubectl") or "kubectl"

pytestmark = pytest.mark.skipif(
    not os.environ.get("KUBECONFIG") or shutil.which("kubectl") is None,
    reason="needs KUBECONFIG and kubectl: make test-cluster",
)


@pytest.fixture(scope="module")
def proxy() -> Iterator[str]:
    """`kubectl proxy`, which knows every way to log in; at the end the contract's definition goes."""
    process = subprocess.Popen([KUBECTL, "proxy", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://{_address(process)}"
    finally:
        process.terminate()
        process.wait(timeout=PROXY_SECONDS)
        remove = ("delete", "crd", "widgets.contract.kvmesh.io", "--ignore-not-found", "--timeout=30s")
        subprocess.run([KUBECTL, *remove], check=False, timeout=60)


def _address(process: subprocess.Popen[str]) -> str:
    if process.stdout is None or not select.select([process.stdout], [], [], PROXY_SECONDS)[0]:
        raise TimeoutError("kubectl proxy does not start")
    line = process.stdout.readline()
    found = re.search(r"127\.0\.0\.1:\d+", line)
    if found is None:
        raise RuntimeError(f"kubectl proxy said {line!r}")
    return found[0]


class TestContractOfARealCluster(KubernetesContract, PolicyContract):
    @pytest.fixture
    async def rest(self, proxy: str) -> AsyncIterator[Rest]:
        async with rest(proxy) as client:
            yield client

"""The conformance suite of the Gateway API inference extension, as it is, on Istio's gateways with our picker."""

from pathlib import Path

import pytest

from tests.mesh.istio_proxy import IstioProxy
from tests.mesh_cluster.cluster import Cluster
from tests.mesh_cluster.conformance import SUITE_SECONDS, conformance_parts, run_suite

pytestmark = pytest.mark.asyncio(loop_scope="session")
CASES = frozenset(
    (
        *("EppUnAvailableFailOpen", "GatewayDestinationEndpointServed", "GatewayFollowingEPPRouting"),
        *("GatewayFollowingEPPRoutingWithDataParallelism", "GatewayWeightedAcrossTwoInferencePools"),
        *("HTTPRouteInvalidInferencePoolRef", "HTTPRouteMultipleGatewaysDifferentPools"),
        *("HTTPRouteMultipleRulesDifferentPools", "InferencePoolAccepted", "InferencePoolHTTPRoutePortValidation"),
        *("InferencePoolInvalidEPPService", "InferencePoolResolvedRefsCondition"),
    )
)


@pytest.mark.timeout(SUITE_SECONDS)
async def test_every_case_of_the_suite_passes(
    started: tuple[Cluster, IstioProxy], secrets: Path, tmp_path: Path
) -> None:
    cluster, _ = started
    async with conformance_parts(cluster.kube, tmp_path, secrets=secrets):
        verdict = await run_suite(cluster.kube, tmp_path / "suite.log")
    assert verdict.failed == frozenset(), verdict.words[-4000:]
    assert verdict.passed == CASES

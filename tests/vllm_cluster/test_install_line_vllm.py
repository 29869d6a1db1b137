"""The line of docs/start/istio.md before real vLLM pods: exact tokens without a further flag."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.stack import eventually
from tests.mesh.install_checks import story
from tests.mesh.istio_proxy import IstioProxy
from tests.mesh_cluster.cluster import API_PORT, Cluster
from tests.mesh_cluster.install_line import installed_by_the_line
from tests.vllm.environment import VllmEnvironment
from tests.vllm.servers import running_pods

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


async def test_a_repeated_prompt_is_predicted_exactly(
    started: tuple[Cluster, IstioProxy], vllm_environment: VllmEnvironment, tiny_model: Path
) -> None:
    cluster, _ = started

    @asynccontextmanager
    async def servers(pods: Mapping[str, str]) -> AsyncIterator[None]:
        with ExitStack() as stack:
            starting = running_pods(
                len(pods),
                environment=vllm_environment,
                model_folder=tiny_model,
                logs=cluster.folder / "vllm",
                addresses=[f"{address}:{API_PORT}" for address in pods.values()],
            )
            await asyncio.to_thread(stack.enter_context, starting)
            yield

    async with installed_by_the_line(cluster, servers) as made:
        prompt = story("line vllm")
        for _ in range(8):
            assert (await made.complete(prompt)).status == 200
        await eventually(partial(made.compared, prompt), lambda seen: seen[0] == [] and seen[1] == seen[2] > 0)
        await eventually(made.token_sources, lambda sources: sources == {"tiny": "pods"})

"""A whole mesh before pods under a test's command, and `openai` clients for it."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from tests.e2e.stack import Stack, eventually, running_stack
from tests.integration.overload_pods import MODEL, HeldPod, held_pods

OBJECTIVE, TENANT = "x-gateway-inference-objective", "x-gateway-inference-fairness-id"


@dataclass(kw_only=True)
class OverloadStack:
    """The mesh, its pods and its clients."""

    stack: Stack
    pods: list[HeldPod]
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    def client(
        self, objective: str | None = None, *, tenant: str | None = None, max_retries: int = 0
    ) -> openai.AsyncOpenAI:
        """Return a client of this class and tenant."""
        headers = {name: value for name, value in ((OBJECTIVE, objective), (TENANT, tenant)) if value is not None}
        client = openai.AsyncOpenAI(
            api_key="none",
            base_url=f"{self.stack.ready['gateway']}/v1",
            default_headers=headers,
            max_retries=max_retries,
            timeout=30.0,
        )
        self.clients.append(client)
        return client

    async def fill(self) -> None:
        """Make every pod full, and wait until the picker knows."""
        for pod in self.pods:
            pod.fill()
        await eventually(self.stack.state, lambda state: all(pod["waiting"] == 100 for pod in state["endpoints"]))

    def free(self) -> None:
        """Let there be room again; pods answer what comes."""
        for pod in self.pods:
            pod.free()
            pod.release()

    async def waiting(self, found: Mapping[str, int]) -> None:
        """Wait until so many of each class wait in the picker's queue."""
        await eventually(self.queued, lambda queued: queued == found)

    async def queued(self) -> dict[str, int]:
        """Return how many of each class wait in the picker's queue."""
        classes = (await self.stack.state())["classes"]
        return {line["class"]: line["waiting"] for line in classes if line["waiting"]}

    async def nothing_is_left(self) -> None:
        """Wait until nobody waits and nothing is booked."""
        await self.waiting({})
        await eventually(self.stack.open_bookings, lambda count: count == 0)
        assert await self.stack.metric("kvmesh_queued_requests") == 0
        assert await self.stack.metric("kvmesh_open_bookings") == 0


@asynccontextmanager
async def overload_stack(
    tmp_path: Path, *flags: str, policy: dict[str, Any], pods: int = 2, **settings: Any
) -> AsyncIterator[OverloadStack]:
    """Start the mesh with this policy; who names a class gets it. Nothing may be left in the end."""
    spec = policy | {"priorities": {"trustObjective": True} | policy.get("priorities", {})}
    document = {"policy": spec, "scrape_interval_ms": 50} | settings
    async with (
        held_pods(pods) as held,
        running_stack(
            tmp_path, "--model", MODEL, *flags, settings=json.dumps(document), endpoints=[pod.address for pod in held]
        ) as stack,
    ):
        running = OverloadStack(stack=stack, pods=held)
        yield running
        for client in running.clients:
            await client.close()
        await running.nothing_is_left()


async def say(client: openai.AsyncOpenAI, text: str = "hello", **fields: Any) -> Any:
    """Send one chat; the answer has its headers, `.parse()` is the completion."""
    messages: Any = [{"role": "user", "content": text}]
    return await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, **fields)

"""Scale from zero on real servers: requests wait at the picker for a pod that is started only then.

Real Envoy, real picker, simulated pods. Where the pod is to listen, nobody does at first.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.stack import Answer, Stack, eventually, free_ports, listens, running_stack

END_SECONDS = 30.0
OBJECTIVE = "x-gateway-inference-objective"
CLASSES = ("sheddable", "standard", "critical")


class Zero:
    """A mesh whose only pod is not there yet."""

    def __init__(self, stack: Stack, port: int) -> None:
        self.stack = stack
        self.port = port
        self.pod: subprocess.Popen[bytes] | None = None

    async def start_pod(self) -> None:
        command = [sys.executable, "-m", "podsim", "--host", "127.0.0.1", "--sim-port", str(self.port)]
        self.pod = await asyncio.to_thread(subprocess.Popen, command)
        await eventually(partial(listens, self.port), bool)

    def ask(self, class_name: str) -> "asyncio.Task[Answer]":
        body = {"model": "tiny", "prompt": f"a prompt of class {class_name}", "max_tokens": 2}
        sent = self.stack.send("POST", "/v1/completions", headers={OBJECTIVE: class_name}, json=body)
        return asyncio.create_task(sent)

    async def waiting(self, found: dict[str, int]) -> None:
        """Wait until so many of each class wait for the first pod."""
        await eventually(self._waiting, lambda seen: seen == found)

    async def _waiting(self) -> dict[str, int]:
        lines = (await self.stack.state())["classes"]
        return {line["class"]: line["waiting_for_pod"] for line in lines if line["waiting_for_pod"]}

    async def nothing_is_left(self) -> None:
        await self.waiting({})
        await eventually(self.stack.open_bookings, lambda count: count == 0)
        assert await self.stack.metric("kvmesh_queued_requests") == 0
        assert await self.stack.metric("kvmesh_waiting_body_bytes") == 0


@asynccontextmanager
async def from_zero(folder: Path, **autoscale: Any) -> AsyncIterator[Zero]:
    (port,) = free_ports(1)
    policy = {
        "autoscale": {"both": {"minReplicas": 0, "maxReplicas": 4, **autoscale}},
        "priorities": {"trustObjective": True},
    }
    settings = json.dumps({"policy": policy, "scrape_interval_ms": 50})
    async with running_stack(folder, "--model", "tiny", endpoints=[f"127.0.0.1:{port}"], settings=settings) as stack:
        zero = Zero(stack, port)
        try:
            yield zero
            await zero.nothing_is_left()
        finally:
            if zero.pod is not None:
                zero.pod.kill()
                zero.pod.wait(timeout=END_SECONDS)


async def test_requests_wait_for_a_pod_that_is_started_only_then_and_all_are_answered_the_important_first(
    tmp_path: Path,
) -> None:
    async with from_zero(tmp_path) as zero:
        stack = zero.stack
        sent = [zero.ask(name) for name in CLASSES * 4]
        await zero.waiting(dict.fromkeys(CLASSES, 4))
        (scale,) = (await stack.state())["scale"]
        assert (scale["wanted"], scale["ready"], scale["state"]) == (1, 0, "no-ready-pods")
        explained = await stack.explain({"model": "tiny", "prompt": "a prompt"})
        assert explained["reason"] == "waits-for-first-pod"
        assert await stack.metric("kvmesh_first_pod_waiting_requests") == 12
        await zero.start_pod()
        answers = await asyncio.gather(*sent)
        assert [answer.status for answer in answers] == [200] * 12
        decided = [each for each in (await stack.state())["decisions"] if each["endpoint"]]
        assert [each["class"] for each in reversed(decided)] == [name for name in CLASSES[::-1] for _ in range(4)]
        assert all("it has waited for the pool's first pod" in each["notes"] for each in decided)
        assert await stack.metric("kvmesh_shed_requests_total") == 0
        assert await stack.metric("kvmesh_first_pod_waits_total") == 12


async def test_a_wait_in_vain_ends_with_503_and_says_when_to_come_back(tmp_path: Path) -> None:
    async with from_zero(tmp_path, startSeconds=40, waitFromZeroSeconds=0.5) as zero:
        answer = await zero.ask("standard")
        assert (answer.status, answer.headers["x-kvmesh-reason"]) == (503, "no-pod-in-time")
        assert 30 <= int(answer.headers["retry-after"]) <= 60  # what is left of the 40 s, and up to half more
        assert answer.json["error"]["code"] == "no_ready_endpoint"


async def test_of_a_client_that_leaves_nothing_is_left_and_the_pod_gets_nothing(tmp_path: Path) -> None:
    async with from_zero(tmp_path) as zero:
        leaving, staying = zero.ask("standard"), zero.ask("critical")
        await zero.waiting({"standard": 1, "critical": 1})
        leaving.cancel()
        await zero.waiting({"critical": 1})
        await zero.start_pod()
        assert (await staying).status == 200
        assert await zero.stack.metric("kvmesh_admitted_requests_total") == 1

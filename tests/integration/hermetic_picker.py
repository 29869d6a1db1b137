"""A whole picker for the hermetic cases: `extproc.service.serve` with its ports, before pods that are told what to say.

There is no Redis: nobody listens at its address, so that a decision rests on the pods' reports and on what this picker
has routed itself.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from extproc.policy.values import Steering
from extproc.service import serve
from extproc.settings.config import PickerSettings
from operate.local.ports import pick_free_port
from tests.integration.hermetic_pods import PodState, running_pods

HOST = "127.0.0.1"
DEADLINE_SECONDS = 20.0
SETTINGS: dict[str, Any] = {
    "host": HOST,
    "model": None,
    "tokenizer_folder": None,
    "hash_seed": "kvmesh",
    "steering": Steering.OVERRIDE_HOST,
    "index_timeout_seconds": 0.05,
    "scrape_interval_seconds": 0.05,
    "scrape_timeout_seconds": 5.0,
    "max_body_bytes": 1 << 20,
    "drain_seconds": 0.0,
    "otlp_endpoint": None,
    "shares_load": False,
    "sample_share": 0.0,  # no answer passes the picker by chance
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picker:
    """A running picker."""

    grpc_address: str
    admin: str
    pods: tuple[str, ...]
    http: aiohttp.ClientSession

    async def get(self, path: str) -> Any:
        """Return one of the admin pages."""
        async with self.http.get(self.admin + path) as response:
            return await (response.json() if response.content_type == "application/json" else response.text())

    async def metric(self, series: str) -> float:
        """Return the sum of all series of the picker's metrics that start so."""
        page = await self.get("/metrics")
        return sum(
            float(value) for value in re.findall(rf"^{re.escape(series)}(?:[,{{].*)? (\S+)$", page, re.MULTILINE)
        )

    async def eventually(self, path: str, holds: Any) -> Any:
        """Read a page again and again until the condition holds."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not holds(page := await self.get(path)):
                await asyncio.sleep(0.01)
        return page


@asynccontextmanager
async def running_picker(states: Sequence[PodState], **changes: Any) -> AsyncIterator[Picker]:
    """Start the pods and a picker before them; yield when it has heard from every pod."""
    ports: list[int] = []
    while len(ports) < 3:
        ports.append(pick_free_port(host=HOST, avoid=ports))
    stop = asyncio.Event()
    async with running_pods(states) as pods, aiohttp.ClientSession() as http:
        settings = PickerSettings(
            **SETTINGS
            | {"grpc_port": ports[0], "admin_port": ports[1], "redis_url": f"redis://{HOST}:{ports[2]}/0"}
            | {"endpoints": pods}
            | changes
        )
        task = asyncio.create_task(serve(settings, stop=stop), name="picker")
        picker = Picker(grpc_address=f"{HOST}:{ports[0]}", admin=f"http://{HOST}:{ports[1]}", pods=pods, http=http)
        try:
            await _ready(picker, task)
            yield picker
        finally:
            stop.set()
            async with asyncio.timeout(DEADLINE_SECONDS):
                await task


async def _ready(picker: Picker, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await _has_heard(picker):
            assert not task.done(), task.result()
            await asyncio.sleep(0.01)


async def _has_heard(picker: Picker) -> bool:
    try:
        async with picker.http.get(f"{picker.admin}/readyz") as answer:
            if answer.status != 200:
                return False
        endpoints = (await picker.get("/state"))["endpoints"]
    except aiohttp.ClientConnectionError:
        return False
    return all(each["state"] == "ready" and each["models"] is not None for each in endpoints)

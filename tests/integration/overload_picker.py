"""A whole picker before pods under command, and clients whose requests may wait: for the tests of admission.

The clients are Envoy's side of ext_proc (`hermetic_envoy`); there is no Redis unless a test brings one.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from extproc.ext_proc.exchange import BodyMode
from extproc.policy.merged_policy import pick_policy
from extproc.policy.values import PickPolicy
from extproc.service import serve
from extproc.settings.config import PickerSettings
from operate.local.ports import pick_free_port
from tests.integration.hermetic_envoy import Envoy, Refused, Routed
from tests.integration.hermetic_picker import SETTINGS, Picker
from tests.integration.overload_pods import HOST, MODEL, HeldPod

DEADLINE_SECONDS = 15.0
ENVOY = Envoy(mode=BodyMode.FULL_DUPLEX_STREAMED, raw=True)


def policy(
    *,
    stale_after_seconds: float = 2.0,
    overload: Mapping[str, Any] | None = None,
    quotas: Sequence[Mapping[str, Any]] = (),
    **priorities: Any,
) -> PickPolicy:
    """Return the policy with these priorities, as merged from documents; who names a class gets it."""
    load = {"staleAfterSeconds": stale_after_seconds, "overload": overload or {}}
    return pick_policy({"load": load, "quotas": quotas, "priorities": {"trustObjective": True} | priorities})[0]


@asynccontextmanager
async def picker_before(
    pods: Sequence[HeldPod], *, stop: asyncio.Event | None = None, **changes: Any
) -> AsyncIterator[Picker]:
    """Start a picker; yield when it has heard from every pod that is there. `stop` ends it before its time."""
    ports: list[int] = []
    while len(ports) < 3:
        ports.append(pick_free_port(host=HOST, avoid=ports))
    stop = stop or asyncio.Event()
    addresses = tuple(pod.address for pod in pods)
    settings = PickerSettings(
        **SETTINGS
        | {"grpc_port": ports[0], "admin_port": ports[1], "redis_url": f"redis://{HOST}:{ports[2]}/0"}
        | {"endpoints": addresses}
        | changes
    )
    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(serve(settings, stop=stop), name="picker")
        picker = Picker(grpc_address=f"{HOST}:{ports[0]}", admin=f"http://{HOST}:{ports[1]}", pods=addresses, http=http)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not await _is_ready(picker):
                    assert not task.done(), task.result()
                    await asyncio.sleep(0.01)
            yield picker
        finally:
            stop.set()
            await task


async def _is_ready(picker: Picker) -> bool:
    try:
        async with picker.http.get(f"{picker.admin}/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False


class Client:
    """One request from its sending to the end of its response."""

    def __init__(self, picker: Picker, *, envoy: Envoy = ENVOY, body: bytes, **request: Any) -> None:
        self._picker, self._envoy, self._body, self._request = picker, envoy, body, request
        self._pick: asyncio.Future[Routed | Refused] = asyncio.get_running_loop().create_future()
        self._answered = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="client")

    @property
    def waits(self) -> bool:
        """Whether the picker has not said anything."""
        return not self._pick.done()

    async def outcome(self) -> Routed | Refused:
        """Return what the picker says, which may take a while."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await asyncio.shield(self._pick)

    async def routed(self) -> str:
        """Return the pod that it is sent to."""
        found = await self.outcome()
        assert isinstance(found, Routed), found
        return found.endpoints[0]

    async def refused(self) -> Refused:
        """Return the refusal."""
        found = await self.outcome()
        assert isinstance(found, Refused), found
        return found

    async def answered(self) -> None:
        """Let its pod answer."""
        self._answered.set()
        await self._task

    async def leave(self) -> None:
        """Go away, whatever comes."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            async with self._envoy.exchange(self._picker.grpc_address) as exchange:
                found = await exchange.request(self._body, **self._request)
                self._pick.set_result(found)
                if isinstance(found, Routed):
                    await self._answered.wait()
                    await exchange.response(b"{}")
        except Exception as error:
            if self._pick.done():
                raise
            self._pick.set_exception(error)


class Crowd:
    """The clients of one test before one picker."""

    def __init__(self, picker: Picker, *, envoy: Envoy = ENVOY) -> None:
        self.picker = picker
        self._envoy = envoy
        self._clients: list[Client] = []

    def send(
        self,
        objective: str | None = None,
        *,
        tenant: str | None = None,
        words: int = 1,
        name: str | None = None,
        model: str = MODEL,
        headers: Mapping[str, str] | None = None,
        **request: Any,
    ) -> Client:
        """Send a completion, and do not wait. `words` is the length of its prompt, `name` its request id."""
        number = len(self._clients)
        sent = {"x-request-id": name or f"request-{number}"} | dict(headers or {})
        if objective is not None:
            sent["x-gateway-inference-objective"] = objective
        if tenant is not None:
            sent["x-gateway-inference-fairness-id"] = tenant
        # no two prompts begin alike: what is cached is another test's matter
        prompt = " ".join(f"{number}-{i}" for i in range(words))
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 100}).encode()
        client = Client(self.picker, envoy=self._envoy, body=body, headers=sent, **request)
        self._clients.append(client)
        return client

    async def waiting(self, count: int | Mapping[str, int]) -> None:
        """Wait until so many wait in the picker's queue, in all or by class."""

        def holds(state: Any) -> bool:
            found = {line["class"]: line["waiting"] for line in state["classes"] if line["waiting"]}
            return found == count if isinstance(count, Mapping) else sum(found.values()) == count

        await self.picker.eventually("/state", holds)

    async def saw(self, **facts: Any) -> None:
        """Wait until the picker has these facts of every pod, such as waiting=100."""
        await self.picker.eventually(
            "/state",
            lambda state: all(pod[name] == value for pod in state["endpoints"] for name, value in facts.items()),
        )

    async def explained(self, endpoint: str) -> Any:
        """Return what a request without a name would see of this pod."""
        body = {"model": MODEL, "prompt": "what nobody asks"}
        async with self.picker.http.post(f"{self.picker.admin}/v1/explain?path=/v1/completions", json=body) as response:
            page = await response.json()
        (line,) = [each for each in page["candidates"] + page["rejected"] if each["endpoint"] == endpoint]
        return line

    async def order(self) -> list[str]:
        """Return the ids of what was decided, the first one first."""
        page = await self.picker.get("/v1/decisions?limit=200")
        return [record["request_id"] for record in reversed(page)]

    async def go_home(self) -> None:
        """End every exchange, and see that nothing is left of them."""
        for client in self._clients:
            await client.leave()
        await self.waiting(0)
        await self.picker.eventually("/state", lambda state: all(not pod["bookings"] for pod in state["endpoints"]))


@asynccontextmanager
async def crowd_before(pods: Sequence[HeldPod], *, envoy: Envoy = ENVOY, **changes: Any) -> AsyncIterator[Crowd]:
    """Start a picker and be its clients; nothing may be left in the picker when they have gone."""
    async with picker_before(pods, **changes) as picker:
        crowd = Crowd(picker, envoy=envoy)
        yield crowd
        await crowd.go_home()

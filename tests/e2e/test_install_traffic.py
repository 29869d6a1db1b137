"""What `kvmesh install` renders, on a configuration like istiod's, before the real picker, index and simulated pods.

One mesh serves all installations that steer alike; each has an Envoy of its own in front of it. The gateway of the mesh
itself (`envoy/local.yaml`) is not used.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from extproc.install.plan import Mode
from extproc.policy.values import Steering
from tests.e2e.stack import Answer, Stack, eventually, free_ports, running_stack
from tests.istiod.base import DENIED_PATH
from tests.istiod.bootstrap import RunningProxy, running_proxy
from tests.istiod.installs import INSTALLATIONS, PICKER, PODS, SHOP, Installation

BODY_LIMIT_BYTES = 200_000
SETTINGS = f"max_body_bytes: {BODY_LIMIT_BYTES}\nknown_models: [tiny]\nsample_share: 1.0\n"
BY_NAME = {str(each): each for each in INSTALLATIONS}
PODS_COUNT = 3


@dataclass(frozen=True, kw_only=True)
class Way:
    """One installation's way into the mesh."""

    installation: Installation
    proxy: RunningProxy
    stack: Stack

    async def send(self, method: str, path: str, *, host: str | None = None, **body: Any) -> Answer:
        """Send a request as a client of this gateway, or through this sidecar."""
        headers = {"Host": host or self.installation.host} | body.pop("headers", {})
        url = f"{self.proxy.listeners[self.installation.entry]}{path}"
        async with self.stack.http.request(method, url, headers=headers, **body) as response:
            return Answer(
                status=response.status,
                headers={name.lower(): value for name, value in response.headers.items()},
                body=await response.read(),
            )

    async def complete(self, prompt: str, *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """Send one completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2} | fields
        return await self.send("POST", "/v1/completions", json=body, headers=headers or {})


@asynccontextmanager
async def way(installation: Installation, stack: Stack, folder: Path) -> AsyncIterator[Way]:
    """Start the installation's Envoy in front of the mesh; the service that is none of ours is not there."""
    endpoints = {PODS.cluster: stack.ready["endpoints"], PICKER.cluster: [stack.ready["extproc"]]}
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    proxied = running_proxy(installation.applied().proxy, folder, endpoints=endpoints | {SHOP.cluster: [nobody]})
    async with proxied as proxy:
        yield Way(installation=installation, proxy=proxy, stack=stack)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(Steering))
async def steered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A mesh whose picker steers so."""
    folder = tmp_path_factory.mktemp("mesh")
    async with running_stack(
        folder, pods=PODS_COUNT, settings=f"{SETTINGS}steering: {Steering(request.param).value}\n"
    ) as stack:
        yield stack


ORIGINAL_DST = [name for name, each in BY_NAME.items() if each.steering is Steering.ORIGINAL_DST]
OVERRIDE_HOST = [name for name in BY_NAME if name not in ORIGINAL_DST]
WAYS = [(Steering.OVERRIDE_HOST, name) for name in OVERRIDE_HOST] + [
    (Steering.ORIGINAL_DST, name) for name in ORIGINAL_DST
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def through(
    request: pytest.FixtureRequest, steered: Stack, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Way]:
    """One installation before the mesh that steers as it does."""
    async with way(BY_NAME[request.param], steered, tmp_path_factory.mktemp("proxy")) as started:
        yield started


each_way = pytest.mark.parametrize(
    ("steered", "through"), WAYS, indirect=True, scope="module", ids=[name for _, name in WAYS]
)


def story(name: str) -> str:
    """Return a prompt that nobody else sends."""
    return " ".join(f"{name} word{i} of a story about the sea" for i in range(40))


@each_way
@pytest.mark.asyncio(loop_scope="module")
async def test_a_repeated_prompt_lands_on_the_pod_that_holds_it(through: Way) -> None:
    prompt = story(f"{through.installation} repeated")
    first = await through.complete(prompt)
    assert first.status == 200, first.body
    await through.stack.indexed(prompt)

    again = [await through.complete(prompt) for _ in range(4)]

    assert {answer.upstream for answer in again} == {first.upstream}
    assert all(answer.cached_tokens > 0 for answer in again)


@each_way
@pytest.mark.asyncio(loop_scope="module")
async def test_unrelated_prompts_are_spread(through: Way) -> None:
    answers = [await through.complete(story(f"{through.installation} unrelated {i}")) for i in range(12)]

    assert {answer.status for answer in answers} == {200}
    assert {answer.upstream for answer in answers} == set(through.stack.ready["endpoints"])


@each_way
@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_names_a_pod_is_not_heard(through: Way) -> None:
    prompt = story(f"{through.installation} steered")
    holder = (await through.complete(prompt)).upstream
    await through.stack.indexed(prompt)
    other = next(each for each in through.stack.ready["endpoints"] if each != holder)

    answer = await through.complete(prompt, headers={"x-gateway-destination-endpoint": other})

    assert answer.upstream == holder


@each_way
@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_over_the_limit_is_answered_413_in_the_picker_s_words(through: Way) -> None:
    answer = await through.send("POST", "/v1/completions", data=bytes(2 * BODY_LIMIT_BYTES))

    assert (answer.status, answer.headers["x-kvmesh-reason"]) == (413, "body-too-large")
    assert answer.json["error"]["message"]


@each_way
@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_that_is_not_listed_is_answered_404_in_the_picker_s_words(through: Way) -> None:
    answer = await through.complete("hello", model="unlisted")

    assert (answer.status, answer.headers["content-type"]) == (404, "application/json")
    assert "unlisted" in answer.json["error"]["message"]


@each_way
@pytest.mark.asyncio(loop_scope="module")
async def test_a_streamed_answer_passes_token_by_token_and_leaves_no_booking(through: Way) -> None:
    answer = await through.complete(story(f"{through.installation} streamed"), stream=True, max_tokens=5)

    events = [line for line in answer.body.decode().split("\n\n") if line.startswith("data: ")]
    assert answer.status == 200
    assert len(events) >= 5
    assert events[-1] == "data: [DONE]"
    await eventually(through.stack.open_bookings, lambda count: count == 0)


@each_way
@pytest.mark.asyncio(loop_scope="module")
async def test_the_responses_of_a_sample_are_read_to_the_end(through: Way) -> None:
    async def compared() -> float:
        return await through.stack.metric("kvmesh_realised_requests_total")

    before, missed = await compared(), await through.stack.metric("kvmesh_responses_missed_total")
    prompt = story(f"{through.installation} sampled")
    await through.complete(prompt)
    await through.stack.indexed(prompt)
    answer = await through.complete(prompt)

    assert answer.cached_tokens > 0
    await eventually(compared, lambda count: count == before + 2)
    assert await through.stack.metric("kvmesh_responses_missed_total") == missed


@each_way
@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_gateway_denies_is_not_counted_as_a_pick_or_a_refusal(through: Way) -> None:
    if through.installation.mode is Mode.SIDECAR:
        pytest.skip("a sidecar judges what comes in, not what goes out")
    counted = ("kvmesh_picks_total", "kvmesh_refusals_total")
    before = [await through.stack.metric(name) for name in counted]

    answer = await through.send("POST", DENIED_PATH, json={})

    assert answer.status == 403
    assert [await through.stack.metric(name) for name in counted] == before
    assert await through.stack.open_bookings() == 0


@each_way
@pytest.mark.asyncio(loop_scope="module")
async def test_another_service_is_answered_for_itself(through: Way) -> None:
    before = (await through.stack.state())["decisions"][0]

    answer = await through.send("POST", "/v1/completions", host=through.installation.other_host, json={"model": "tiny"})

    assert answer.status == 503  # nobody serves it, and no pod of the pool does either
    assert "x-kvmesh-reason" not in answer.headers
    assert (await through.stack.state())["decisions"][0] == before

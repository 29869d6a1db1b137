"""What must be true of every installation on a real istiod, before a picker, an index and simulated pods."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from operate.install.plan import Mode
from tests.e2e.stack import Answer, Stack, eventually
from tests.mesh.installations import DENIED_PATH, Installation

BODY_LIMIT_BYTES = 200_000
SETTINGS = f"max_body_bytes: {BODY_LIMIT_BYTES}\npolicy: {{models: {{onlyListed: true}}}}\nsample_share: 1.0\n"
PODS_COUNT = 3


@dataclass(frozen=True, kw_only=True)
class Way:
    """One installation's way into the mesh."""

    name: str
    installation: Installation
    url: str  # where clients reach it
    stack: Stack

    @asynccontextmanager
    async def begin(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Begin a completion."""
        headers = {"Host": self.installation.host}
        tls: Any = {"ssl": False, "server_hostname": headers["Host"]} if self.url.startswith("https") else {}
        url = f"{self.url}/v1/completions"
        async with self.stack.http.post(url, json=body, headers=headers, **tls) as response:
            yield response

    async def send(self, method: str, path: str, *, host: str | None = None, **body: Any) -> Answer:
        """Send a request as a client of this gateway, or through this sidecar."""
        headers = {"Host": host or self.installation.host} | body.pop("headers", {})
        # a certificate of the tests' own, for the host that is meant
        tls: Any = {"ssl": False, "server_hostname": headers["Host"]} if self.url.startswith("https") else {}
        async with self.stack.http.request(method, f"{self.url}{path}", headers=headers, **tls, **body) as response:
            return Answer(
                status=response.status,
                headers={name.lower(): value for name, value in response.headers.items()},
                body=await response.read(),
            )

    async def complete(self, prompt: str, *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """Send one completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2} | fields
        return await self.send("POST", "/v1/completions", json=body, headers=headers or {})


def story(name: str) -> str:
    """Return a prompt that nobody else sends."""
    return f"{name}: " + " ".join(f"word{i} of a story about the sea" for i in range(40))


async def a_repeated_prompt_lands_on_the_pod_that_holds_it(through: Way) -> None:
    prompt = story(f"{through.name} repeated")
    first = await through.complete(prompt)
    assert first.status == 200, first.body
    await through.stack.indexed(prompt)

    again = [await through.complete(prompt) for _ in range(4)]

    assert {answer.upstream for answer in again} == {first.upstream}
    assert all(answer.cached_tokens > 0 for answer in again)


async def unrelated_prompts_are_spread(through: Way) -> None:
    answers = [await through.complete(story(f"{i} unrelated {through.name}")) for i in range(12)]

    assert {answer.status for answer in answers} == {200}
    assert {answer.upstream for answer in answers} == set(through.stack.ready["endpoints"])


async def a_client_that_names_a_pod_is_not_heard(through: Way) -> None:
    prompt = story(f"{through.name} steered")
    holder = (await through.complete(prompt)).upstream
    await through.stack.indexed(prompt)
    other = next(each for each in through.stack.ready["endpoints"] if each != holder)

    answer = await through.complete(prompt, headers={"x-gateway-destination-endpoint": other})

    assert answer.upstream == holder


async def a_body_over_the_limit_is_answered_413_in_the_picker_s_words(through: Way) -> None:
    headers = {"content-type": "application/json"}  # other bodies may be uploads, which may be longer
    answer = await through.send("POST", "/v1/completions", headers=headers, data=bytes(2 * BODY_LIMIT_BYTES))

    assert (answer.status, answer.headers["x-kvmesh-reason"]) == (413, "body-too-large")
    assert answer.json["error"]["message"]


async def a_model_that_is_not_listed_is_answered_404_in_the_picker_s_words(through: Way) -> None:
    answer = await through.complete("hello", model="unlisted")

    assert (answer.status, answer.headers["content-type"]) == (404, "application/json")
    assert "unlisted" in answer.json["error"]["message"]


async def a_streamed_answer_passes_token_by_token_and_leaves_no_booking(through: Way) -> None:
    answer = await through.complete(story(f"{through.name} streamed"), stream=True, max_tokens=5)

    events = [line for line in answer.body.decode().split("\n\n") if line.startswith("data: ")]
    assert answer.status == 200
    assert len(events) >= 5
    assert events[-1] == "data: [DONE]"
    await eventually(through.stack.open_bookings, lambda count: count == 0)


async def a_client_that_leaves_leaves_no_booking(through: Way) -> None:
    body = {"model": "tiny", "prompt": story(f"{through.name} left"), "max_tokens": 500, "stream": True}
    body |= {"ignore_eos": True}
    async with through.begin(body) as response:
        await response.content.readany()
        assert await through.stack.open_bookings() > 0
        response.close()
        await eventually(through.stack.open_bookings, lambda count: count == 0)


async def the_responses_of_a_sample_are_read_to_the_end(through: Way) -> None:
    async def compared() -> float:
        return await through.stack.metric("kvmesh_realised_requests_total")

    before, missed = await compared(), await through.stack.metric("kvmesh_responses_missed_total")
    prompt = story(f"{through.name} sampled")
    await through.complete(prompt)
    await through.stack.indexed(prompt)
    answer = await through.complete(prompt)

    assert answer.cached_tokens > 0
    await eventually(compared, lambda count: count == before + 2)
    assert await through.stack.metric("kvmesh_responses_missed_total") == missed


async def what_the_gateway_denies_is_not_counted_as_a_pick_or_a_refusal(through: Way) -> None:
    if through.installation.mode is Mode.SIDECAR:
        pytest.skip("a sidecar judges what comes in, not what goes out")
    counted = ("kvmesh_picks_total", "kvmesh_refusals_total")
    before = [await through.stack.metric(name) for name in counted]

    answer = await through.send("POST", DENIED_PATH, json={})

    assert answer.status == 403
    assert [await through.stack.metric(name) for name in counted] == before
    assert await through.stack.open_bookings() == 0


async def every_answer_names_its_request(through: Way) -> None:
    named = {"x-request-id": "2c6ad1cb-23cb-4bcb-8d7a-0e3d7a8b6b6d"}
    answers = [await through.complete("hello", headers=named, model=model) for model in ("tiny", "unlisted")]
    if through.installation.mode is not Mode.SIDECAR:  # which denies nothing: an answer of Envoy's own
        answers.append(await through.send("POST", DENIED_PATH, json={}, headers=named))

    assert [answer.status for answer in answers] == [200, 404, 403][: len(answers)]
    # a gateway may have given it another name, as the client is none that it trusts
    assert all(len(answer.headers["x-request-id"]) == 36 for answer in answers)
    assert ["x-kvmesh-decision-id" in answer.headers for answer in answers] == [True, True, False][: len(answers)]


async def another_service_is_answered_for_itself(through: Way) -> None:
    before = (await through.stack.state())["decisions"][:1]

    answer = await through.send("POST", "/v1/completions", host=through.installation.other_host, json={"model": "tiny"})

    assert answer.status == 503  # nobody serves it, and no pod of the pool does either
    assert "x-kvmesh-reason" not in answer.headers
    assert (await through.stack.state())["decisions"][:1] == before


CHECKS: Sequence[Callable[[Way], Awaitable[None]]] = (
    a_repeated_prompt_lands_on_the_pod_that_holds_it,
    unrelated_prompts_are_spread,
    a_client_that_names_a_pod_is_not_heard,
    a_body_over_the_limit_is_answered_413_in_the_picker_s_words,
    a_model_that_is_not_listed_is_answered_404_in_the_picker_s_words,
    a_streamed_answer_passes_token_by_token_and_leaves_no_booking,
    a_client_that_leaves_leaves_no_booking,
    the_responses_of_a_sample_are_read_to_the_end,
    what_the_gateway_denies_is_not_counted_as_a_pick_or_a_refusal,
    every_answer_names_its_request,
    another_service_is_answered_for_itself,
)

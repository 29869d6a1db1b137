"""Conversations that real vLLM servers keep go on where they were begun, through the real stack."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from extproc.requests.responses_api import is_owned
from tests.e2e.stack import Answer, Stack
from tests.vllm.environment import VllmEnvironment
from tests.vllm.servers import MODEL_NAME, VllmPod, running_pods
from tests.vllm.test_stack import stack_before

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def keeping_pods(
    vllm_environment: VllmEnvironment, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmPod, ...]]:
    logs = tmp_path_factory.mktemp("keeping")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        with running_pods(2, environment=vllm_environment, model_folder=tiny_model, logs=logs) as pods:
            yield pods


@pytest.fixture
async def stack(keeping_pods: tuple[VllmPod, ...], tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack_before(keeping_pods, tmp_path) as running:
        yield running


async def say(stack: Stack, text: str, **more: object) -> Answer:
    body = {"model": MODEL_NAME, "input": text, "max_output_tokens": 5, "temperature": 0, **more}
    return await stack.send("POST", RESPONSES, json=body)


async def test_every_turn_of_a_conversation_finds_the_pod_that_keeps_it(
    stack: Stack, keeping_pods: tuple[VllmPod, ...]
) -> None:
    begun = await asyncio.gather(*[say(stack, f"conversation {number}") for number in range(8)])
    assert [answer.status for answer in begun] == [200] * 8
    assert {answer.upstream for answer in begun} == {pod.address for pod in keeping_pods}
    for first in begun:
        before = first
        for turn in range(3):
            answer = await say(stack, f"turn {turn}", previous_response_id=before.json["id"])
            assert (answer.status, answer.upstream) == (200, first.upstream), answer.body
            assert is_owned(answer.json["id"])
            # it has the whole conversation before it
            assert answer.json["usage"]["input_tokens"] > before.json["usage"]["input_tokens"]
            before = answer
        kept = await stack.send("GET", f"{RESPONSES}/{before.json['id']}")
        assert (kept.status, kept.upstream, kept.json["id"]) == (200, first.upstream, before.json["id"])


async def test_a_stream_has_the_id_too_and_a_background_response_can_be_cancelled(stack: Stack) -> None:
    streamed = await say(stack, "stream", stream=True)
    (line,) = [
        line for line in streamed.body.split(b"\n") if line.startswith(b"data: ") and b"response.created" in line
    ]
    response_id = line.partition(b'"id":"')[2].partition(b'"')[0].decode()
    assert is_owned(response_id)
    background = await say(stack, "background", background=True, max_output_tokens=2000)
    cancelled = await stack.send("POST", f"{RESPONSES}/{background.json['id']}/cancel")
    assert cancelled.upstream == background.upstream
    # or vLLM has finished it already
    assert cancelled.status == 200 or b"Cannot cancel" in cancelled.body


async def test_an_id_of_the_client_s_own_is_remembered_and_an_unknown_one_is_not_found(stack: Stack) -> None:
    named = await say(stack, "mine", request_id="resp_mine")
    assert named.json["id"] == "resp_mine"
    again = await say(stack, "and on", previous_response_id="resp_mine")
    assert (again.status, again.upstream) == (200, named.upstream)
    unknown = await say(stack, "who", previous_response_id="resp_of_nobody")
    assert (unknown.status, unknown.headers["x-kvmesh-reason"]) == (404, "unknown-response")
    assert unknown.json["error"]["type"] == "invalid_request_error"


async def test_what_need_not_be_kept_goes_as_it_is(stack: Stack) -> None:
    answer = await say(stack, "forget", store=False)
    assert not is_owned(answer.json["id"])

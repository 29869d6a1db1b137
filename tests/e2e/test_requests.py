"""What clients of a running mesh see: prefix routing, every prompt form, errors, streaming, nothing leaked."""

import asyncio
import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import yarl

from extproc.ext_proc.exchange import BODY_CHUNK_BYTES
from extproc.policy.values import PickPolicy
from podsim.model_folder import TINY_MODEL
from tests.e2e.stack import Answer, Stack, eventually, running_stack, simulated_pods

pytestmark = pytest.mark.asyncio(loop_scope="module")


def fresh_prompt(words: int = 120) -> str:
    """Return a prompt that shares no block with any other."""
    return f"{uuid.uuid4()} " + " ".join(f"word{i} of a story about the sea" for i in range(words))


async def test_a_repeated_chat_lands_on_the_pod_that_holds_it(stack: Stack) -> None:
    chat = {
        "model": "tiny",
        "max_tokens": 4,
        "messages": [{"role": "system", "content": fresh_prompt()}, {"role": "user", "content": "Tell me."}],
    }
    first = await stack.send("POST", "/v1/chat/completions", json=chat)
    assert (first.status, first.cached_tokens) == (200, 0)
    known = await eventually(
        lambda: stack.explain(chat, path="/v1/chat/completions"), lambda answer: answer["matched_tokens"] > 0
    )
    repeats = [await stack.send("POST", "/v1/chat/completions", json=chat) for _ in range(4)]
    assert {answer.upstream for answer in repeats} == {first.upstream}
    assert {answer.cached_tokens for answer in repeats} == {known["matched_tokens"]}


async def test_without_a_tokenizer_the_pods_tell_the_tokens_and_what_is_expected_comes_true(tmp_path: Path) -> None:
    # the pods' folder is on this machine, and found otherwise
    settings = "policy: {models: {served: [{name: tiny, tokens: auto}]}}\n"
    async with simulated_pods(2) as pods, running_stack(tmp_path, endpoints=list(pods), settings=settings) as mesh:
        chat = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": fresh_prompt()}]}
        first = await mesh.send("POST", "/v1/chat/completions", json=chat)
        assert (first.status, first.cached_tokens) == (200, 0)
        known = await eventually(
            lambda: mesh.explain(chat, path="/v1/chat/completions"), lambda answer: answer["matched_tokens"] > 0
        )
        repeats = [await mesh.send("POST", "/v1/chat/completions", json=chat) for _ in range(4)]
        assert {answer.upstream for answer in repeats} == {first.upstream}
        assert {answer.cached_tokens for answer in repeats} == {known["matched_tokens"]}
        await eventually(mesh.state, lambda state: state["token_sources"] == {"tiny": "pods"})


async def test_a_folder_whose_tokens_are_not_the_pods_is_found_and_the_pods_tell_them(tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    served = {"name": "tiny", "tokenizer": str(TINY_MODEL), "chatTemplate": str(tmp_path / "other.jinja")}
    settings = json.dumps({"policy": {"models": {"served": [served]}}})
    async with simulated_pods(2) as pods, running_stack(tmp_path, endpoints=list(pods), settings=settings) as mesh:
        state = await eventually(mesh.state, lambda state: state["token_states"].get("tiny", [""])[0] == "differs")
        assert "other tokens than" in state["token_states"]["tiny"][1]
        chat = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": fresh_prompt()}]}
        first = await mesh.send("POST", "/v1/chat/completions", json=chat)
        known = await eventually(
            lambda: mesh.explain(chat, path="/v1/chat/completions"), lambda answer: answer["matched_tokens"] > 0
        )
        again = await mesh.send("POST", "/v1/chat/completions", json=chat)
        assert (again.upstream, again.cached_tokens) == (first.upstream, known["matched_tokens"])
        await eventually(mesh.state, lambda state: state["token_sources"] == {"tiny": "pods"})


@pytest.mark.parametrize(
    "form",
    [
        lambda text: text,
        lambda text: [text],
        lambda text: list(text.encode()),
        lambda text: [list(text.encode())],
        lambda text: [text, text + " and another end"],
    ],
    ids=["text", "texts", "tokens", "token-lists", "two-texts"],
)
async def test_every_prompt_form_is_routed_to_its_prefix(stack: Stack, form: Any) -> None:
    prompt = form(fresh_prompt(60))
    first = await stack.complete(prompt)
    assert first.status == 200
    await stack.indexed(prompt)
    repeats = [await stack.complete(prompt) for _ in range(3)]
    assert {answer.upstream for answer in repeats} == {first.upstream}
    assert all(answer.cached_tokens > 0 for answer in repeats)


async def test_unrelated_prompts_are_spread_over_the_pods(stack: Stack) -> None:
    answers = await asyncio.gather(*(stack.complete(fresh_prompt(30), max_tokens=8) for _ in range(24)))
    served = Counter(answer.upstream for answer in answers)
    assert set(served) == set(stack.ready["endpoints"])


async def test_requests_without_a_body_are_balanced(stack: Stack) -> None:
    served: set[str] = set()

    async def one_more() -> set[str]:
        answer = await stack.send("GET", "/health")
        assert answer.status == 200
        served.add(answer.upstream)
        return served

    # not a fixed number: until the next scrape, a pod that was busy in the last one is left alone
    await eventually(one_more, lambda seen: seen == set(stack.ready["endpoints"]))


@pytest.mark.parametrize("method", ["OPTIONS", "GET", "PUT"])
async def test_other_methods_on_a_known_path_are_left_to_the_pod(stack: Stack, method: str) -> None:
    answer = await stack.send(method, "/v1/chat/completions")
    assert answer.upstream in stack.ready["endpoints"]
    assert "x-kvmesh-reason" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/[/x]", "/%00", "/v1/completions?" + "x" * 4000, "//", "/%1b[31m"])
async def test_strange_paths_harm_nobody(stack: Stack, path: str) -> None:
    url = yarl.URL(stack.ready["gateway"] + path, encoded=True)
    async with stack.http.get(url) as response:
        assert response.status in (200, 400, 404, 405)
    assert (await stack.complete("still there")).status == 200


async def test_a_client_cannot_steer(stack: Stack) -> None:
    prompt = fresh_prompt(60)
    holder = (await stack.complete(prompt)).upstream
    await stack.indexed(prompt)
    other = next(pod for pod in stack.ready["endpoints"] if pod != holder)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    answer = await stack.send("POST", "/v1/completions", json=body, headers={"x-gateway-destination-endpoint": other})
    assert answer.upstream == holder


def error_of(answer: Answer) -> tuple[int, str, str, str]:
    error = answer.json["error"]
    return answer.status, answer.headers["x-kvmesh-reason"], error["type"], answer.headers["content-type"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"nonsense", b"\xff\xfe", b"[" * 100_000], ids=repr)
async def test_malformed_json_is_answered_400(stack: Stack, body: bytes) -> None:
    answer = await stack.send("POST", "/v1/chat/completions", data=body, headers={"content-type": "application/json"})
    assert answer.status == 400
    assert answer.headers["x-kvmesh-reason"].startswith("malformed")
    assert answer.json["error"]["type"] == "invalid_request_error"


async def test_a_body_over_the_limit_is_answered_413(stack: Stack) -> None:
    answer = await stack.complete("x" * 200_000)
    assert error_of(answer) == (413, "body-too-large", "invalid_request_error", "application/json")


async def test_a_model_that_is_not_listed_is_answered_404(stack: Stack) -> None:
    answer = await stack.complete("hello", model="nobody")
    assert error_of(answer) == (404, "unknown-model", "invalid_request_error", "application/json")
    assert answer.json["error"]["code"] == "model_not_found"


async def test_a_listed_model_without_a_tokenizer_is_routed_on_load(stack: Stack) -> None:
    answer = await stack.complete("hello", model="other")
    assert answer.headers["x-kvmesh-upstream"]  # a pod answers 404 here, not the picker, and none makes its tokens
    decision = (await stack.state())["decisions"][0]
    assert (decision["model"], decision["degraded"]) == ("other", ["render-unavailable"])


async def test_a_body_of_several_chunks_reaches_the_pod_unchanged(stack: Stack) -> None:
    text = "".join(f"{i}  b\u00e9\U0001f600\t\n" for i in range(9000))
    body = json.dumps({"model": "tiny", "prompt": text, "unknown": 2**70}, ensure_ascii=False, indent=1).encode()
    pod = stack.ready["endpoints"][0]
    through = await stack.send("POST", "/tokenize", data=body)
    async with stack.http.post(f"http://{pod}/tokenize", data=body) as direct:
        assert through.json == await direct.json()
    assert len(body) > 2 * BODY_CHUNK_BYTES


async def test_openai_clients_stream_through(stack: Stack) -> None:
    client = openai.AsyncOpenAI(base_url=f"{stack.ready['gateway']}/v1", api_key="none", max_retries=0)
    stream = await client.chat.completions.create(
        model="tiny",
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        messages=[{"role": "user", "content": fresh_prompt(40)}],
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    await client.close()


async def test_clients_that_vanish_leave_no_booking(stack: Stack) -> None:
    await vanish(stack)


async def vanish(stack: Stack) -> None:
    body = {"model": "tiny", "prompt": fresh_prompt(40), "max_tokens": 2000, "stream": True, "ignore_eos": True}
    url = f"{stack.ready['gateway']}/v1/completions"
    async with aiohttp.ClientSession() as leaving:
        answers = [await leaving.post(url, json=body) for _ in range(6)]
        await eventually(stack.open_bookings, lambda count: count == 6)
        for answer in answers:
            answer.close()
    await eventually(stack.open_bookings, lambda count: count == 0)


async def test_explain_says_what_each_scorer_said_without_booking(stack: Stack) -> None:
    prompt = fresh_prompt(60)
    holder = (await stack.complete(prompt)).upstream
    before = await stack.state()
    answer = await stack.indexed(prompt)
    after = await stack.state()
    winner = next(candidate for candidate in answer["candidates"] if candidate["endpoint"] == answer["endpoint"])
    assert answer["endpoint"] == holder
    assert winner["matched_blocks"] * 16 == winner["matched_tokens"] > 0
    assert set(winner["scores"]) == set(PickPolicy().weights)
    assert len(answer["fallbacks"]) == 2
    assert [pod["picks"] for pod in before["endpoints"]] == [pod["picks"] for pod in after["endpoints"]]


async def test_the_metrics_count_what_happened(stack: Stack) -> None:
    names = ("kvmesh_decisions_total", "kvmesh_picks_total", "kvmesh_pod_responses_total", "kvmesh_prompt_tokens_total")
    before = [await stack.metric(name) for name in names]
    answer = await stack.complete("hello")
    await eventually(stack.open_bookings, lambda count: count == 0)
    after = [await stack.metric(name) for name in names]
    prompt_tokens = answer.json["usage"]["prompt_tokens"]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1, 1, prompt_tokens]
    assert await stack.metric("kvmesh_open_bookings") == 0


async def test_buffered_bodies_are_served_alike(tmp_path: Path) -> None:
    async with running_stack(tmp_path, "--body-mode", "buffered", settings="max_body_bytes: 200000\n") as stack:
        prompt = fresh_prompt(600)
        first = await stack.complete(prompt)
        await stack.indexed(prompt)
        repeat = await stack.complete(prompt)
        assert (repeat.status, repeat.upstream) == (200, first.upstream)
        assert repeat.cached_tokens > 0
        assert (await stack.send("GET", "/health")).status == 200
        too_large = await stack.complete("x" * 200_000)
        assert error_of(too_large) == (413, "body-too-large", "invalid_request_error", "application/json")
        await vanish(stack)

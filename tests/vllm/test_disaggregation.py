"""One prefill and two decode pods of real vLLM with NixlConnector behind the real stack."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack, eventually, running_stack
from tests.e2e.test_disaggregation import CONNECTOR, RACES, answer, forms, text
from tests.e2e.test_transfer_fields import BODIES, CHAT, CHOSEN, COMPLETIONS, FORMS, GENERATE, PACKS
from tests.vllm.environment import VllmEnvironment, ensure_nixl, with_start
from tests.vllm.servers import MODEL_NAME, VllmPod, free_port, running_pods

# patient: three servers share this machine's cores
SETTINGS = "index_timeout_ms: 2000\nsample_share: 1.0\n"
REQUESTS = 50
LONG_PROMPTS, LONG_WORDS, LONG_TOKENS = 6, 100, 1200
PATIENT_SECONDS = 300.0  # a fetch over UCX's TCP has taken 118 s


@pytest.fixture(scope="module")
def split_pods(
    vllm_environment: VllmEnvironment, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmPod, ...]]:
    """Three servers that hand caches over by TCP: the first is to prefill."""
    nixl = ensure_nixl(vllm_environment)

    def environment() -> dict[str, str]:
        return {
            "PYTHONPATH": with_start(str(nixl)),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": "lo",
        }

    flags = (
        "--kv-transfer-config",
        json.dumps(CONNECTOR | {"kv_buffer_device": "cpu"}),
    )
    with running_pods(
        3,
        environment=vllm_environment,
        model_folder=tiny_model,
        logs=tmp_path_factory.mktemp("split"),
        extra_flags=flags,
        extra_env=environment,
    ) as pods:
        yield pods


@asynccontextmanager
async def stack_before(
    pods: tuple[VllmPod, ...], folder: Path, *, prefill: int = 1, policy: str = "rule: always"
) -> AsyncIterator[Stack]:
    """Start the stack; every prompt is computed by the first pods, so many of them, while they are there."""
    (folder / "policy.yaml").write_text(f"disaggregation: {{enabled: true, {policy}}}\n", encoding="utf-8")
    roles = ",".join(f"{pod.address}=prefill" for pod in pods[:prefill])
    settings = f"{SETTINGS}roles: {roles}\npolicy: {folder / 'policy.yaml'}\n"
    flags = ("--model", MODEL_NAME, "--tokenizer", str(pods[0].model_folder))
    names = [pod.address for pod in pods]
    async with running_stack(
        folder, *flags, settings=settings, endpoints=names, answer_seconds=PATIENT_SECONDS
    ) as stack:
        await eventually(stack.state, lambda state: all(pod["state"] == "ready" for pod in state["endpoints"]))
        yield stack


def metric(pod: VllmPod, name: str, **labels: str) -> float:
    """Return the sum of a server's series of this name and these labels."""
    series = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", pod.get_text("/metrics"), re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for found, value in series if all(each in found for each in wanted))


def greedy(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"temperature": 0}


async def test_long_prompts_are_fetched_from_an_idle_prefill_pod_however_long_it_takes(
    split_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    async with stack_before(split_pods, tmp_path) as stack:
        for _ in range(LONG_PROMPTS):
            prompt = text(LONG_WORDS)
            status, served_by, words = await answer(stack, "/v1/completions", greedy(forms(prompt)[1][1]))
            assert (status, served_by in [pod.address for pod in split_pods[1:]]) == (200, True), words
        assert await stack.metric("kvmesh_prefill_legs_total") == LONG_PROMPTS
        assert (await stack.state())["decisions"][0]["prompt_tokens"] >= LONG_TOKENS


async def test_mixed_requests_have_a_single_pods_words_and_the_predicted_hits(
    split_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    decode = split_pods[1:]
    fetched = sum(metric(pod, "vllm:nixl_bytes_transferred_count") for pod in decode)
    async with stack_before(split_pods, tmp_path) as stack:
        prompts = [text(4 + 3 * number) for number in range(REQUESTS // 8)]  # up to 350 tokens
        asked = []
        for number in range(REQUESTS):
            # every second one goes on from a prompt that was sent before
            prompt = prompts[number % len(prompts)] + (text(number % 7) if number % 2 else "")
            path, body = forms(prompt)[number % 4]
            status, served_by, words = await answer(stack, path, greedy(body))
            assert (status, served_by in [pod.address for pod in decode]) == (200, True), words
            asked.append((path, body, words))
        for path, body, words in asked:
            assert await answer(stack, path, greedy(body), pod=decode[0].address) == (200, "", words)
        # what was handed over is in the index as held by both: vLLM publishes what it has fetched
        known = await stack.indexed(prompts[-1], tokens=64)
        assert known["prefill"]["remote_uncached_tokens"] <= known["prompt_tokens"] / 2, known["prefill"]
        legs = await stack.metric("kvmesh_prefill_legs_total")
        names = ("requests", "predicted_tokens", "cached_tokens")
        realised = {name: await stack.metric(f"kvmesh_realised_{name}_total") for name in names}
    assert legs == REQUESTS
    assert sum(metric(pod, "vllm:nixl_bytes_transferred_count") for pod in decode) - fetched == REQUESTS
    assert sum(metric(pod, "vllm:nixl_num_failed_transfers_total") for pod in split_pods) == 0
    assert realised["predicted_tokens"] == realised["cached_tokens"] > 0, realised
    # a completion's stream tells usage only where its client asks for it
    assert realised["requests"] >= REQUESTS // 4 * 3, realised


async def test_what_two_pods_have_raced_for_has_a_single_pods_words_and_nothing_of_a_loser_runs_on(
    split_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    *racing, decode = split_pods
    fetched, asked = metric(decode, "vllm:nixl_bytes_transferred_count"), 0
    async with stack_before(split_pods, tmp_path, prefill=2, policy=RACES) as stack:
        for number in range(3):
            for path, body in forms(text(20 + number)):
                status, _, words = await answer(stack, path, greedy(body))
                assert (status, "", words) == await answer(stack, path, greedy(body), pod=decode.address)
                asked += 1
        races = await stack.metric("kvmesh_prefill_races_total")
        assert await stack.metric(r'kvmesh_prefill_legs_total\{[^}]*outcome="(late|lost)"\}') == races > 0
        await eventually(stack.open_bookings, lambda open_: open_ == 0)

        async def unfinished() -> float:
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            return sum([await asyncio.to_thread(metric, pod, name) for pod in racing for name in names])

        await eventually(unfinished, lambda count: count == 0)
    # four forms of a prompt: the decode pod holds the blocks of all but the first, and fetches what is left
    assert asked / 4 <= metric(decode, "vllm:nixl_bytes_transferred_count") - fetched <= asked
    assert sum(metric(pod, "vllm:nixl_num_failed_transfers_total") for pod in split_pods) == 0


def further_forms(prompt: str) -> list[tuple[str, dict[str, Any]]]:
    """Return one request of each further API that takes transfer parameters, as a stream, too."""
    messages = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 5}
    tokens = {"token_ids": [number % 200 + 10 for number in prompt.encode()], "sampling_params": {"max_tokens": 5}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": prompt, "max_output_tokens": 5},
        "/v1/messages": messages,
        "/inference/v1/generate": tokens,
    }
    return [
        (path, {"model": MODEL_NAME, **body, "stream": stream})
        for path, body in bodies.items()
        for stream in (False, True)
    ]


async def said(stack: Stack, path: str, body: dict[str, Any], *, pod: str | None = None) -> tuple[int, str]:
    """Return status and what was generated: texts, or token ids."""
    async with stack.http.post(f"{stack.ready['gateway'] if pod is None else f'http://{pod}'}{path}", json=body) as got:
        raw = await got.text()
    if path.endswith("generate"):
        return got.status, ",".join(re.findall(r'"token_ids": ?\[([^\]]*)\]', raw))
    if not body["stream"]:
        return got.status, "".join(re.findall(r'"text": ?("(?:[^"\\]|\\.)*")', raw))
    deltas = [json.loads(event).get("delta", "") for event in re.findall(r"^data: (\{.*)$", raw, re.MULTILINE)]
    return got.status, "".join([delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas])


async def test_responses_messages_and_generate_have_legs_and_a_single_pods_words(
    split_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    decode = split_pods[1:]
    fetched = sum(metric(pod, "vllm:nixl_bytes_transferred_count") for pod in decode)
    async with stack_before(split_pods, tmp_path) as stack:
        for path, form in further_forms(text(20)):
            greedily = {"sampling_params": {**form.get("sampling_params", {}), "temperature": 0}}
            body = form | greedily if path.endswith("generate") else greedy(form)
            status, words = await said(stack, path, body)
            assert (status, words != "") == (200, True), (path, body["stream"])
            assert await said(stack, path, body, pod=decode[0].address) == (200, words), (path, body["stream"])
        legs = await stack.metric("kvmesh_prefill_legs_total")
    # the second of each two has its prompt on the decode pod already, and one leg all the same
    assert legs == len(further_forms(""))
    assert sum(metric(pod, "vllm:nixl_bytes_transferred_count") for pod in decode) - fetched >= legs / 2


async def test_a_client_that_leaves_ends_the_leg_in_the_engine(split_pods: tuple[VllmPod, ...], tmp_path: Path) -> None:
    prefill = split_pods[0]
    done = metric(prefill, "vllm:request_success_total")

    async def running(_: object = None) -> float:
        return await asyncio.to_thread(metric, prefill, "vllm:num_requests_running")

    async with stack_before(split_pods, tmp_path) as stack:
        # so many that the engine cannot be done with them before their clients leave
        path, _ = forms("")[0]
        bodies = [greedy(forms(text(250))[0][1]) for _ in range(12)]
        tasks = [asyncio.create_task(answer(stack, path, body)) for body in bodies]
        await eventually(running, lambda count: count > 0)
        for task in tasks:
            task.cancel()
        await eventually(running, lambda count: count == 0)
        await eventually(stack.open_bookings, lambda open_: open_ == 0)
        waiting = metric(prefill, "vllm:num_requests_waiting")
    # vLLM 0.32 counts no aborted request; those that neither run nor wait and have not ended well are just these
    assert (metric(prefill, "vllm:request_success_total") - done < len(bodies), waiting) == (True, 0.0)


async def test_a_prefill_pod_that_dies_under_load_costs_no_client_an_error(
    split_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    prefill = split_pods[0]
    statuses: list[int] = []
    async with stack_before(split_pods, tmp_path) as stack:

        async def load(number: int) -> None:
            while len(statuses) < 40:
                path, body = forms(text(40))[number]
                status, _, _ = await answer(stack, path, greedy(body))
                statuses.append(status)

        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(load(number))
            await eventually(
                lambda: stack.metric("kvmesh_prefill_legs_total"), lambda legs: legs > 5, seconds=PATIENT_SECONDS
            )
            prefill.kill()
        assert set(statuses) == {200}
        await eventually(stack.open_bookings, lambda open_: open_ == 0)


@asynccontextmanager
async def connections() -> AsyncIterator[tuple[int, list[object]]]:
    """Yield a port, and who has connected to it so far."""
    peers: list[object] = []

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer.get_extra_info("peername"))

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], peers


async def test_no_field_of_a_client_makes_an_engine_connect_or_end(
    split_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    """The last of this file: its pod ends, by a field that no picker has removed."""
    pod = split_pods[1]
    flags = ("--model", MODEL_NAME, "--tokenizer", str(pod.model_folder))
    fetch = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_block_ids": [[1]]}
    async with (
        connections() as (port, peers),
        running_stack(tmp_path, *flags, settings=SETTINGS, endpoints=[pod.address]) as stack,
    ):
        await eventually(stack.state, lambda state: state["endpoints"][0]["state"] == "ready")
        fetch |= {"remote_host": "127.0.0.1", "remote_port": port, "tp_size": 1}
        chosen = json.dumps(fetch)[1:-1].encode()
        statuses: list[int] = []
        for path, body in BODIES.items():
            for form in FORMS:
                given = body.replace(b"@", form.replace(CHOSEN, chosen))
                for coding, pack in {"identity": bytes, **PACKS}.items():
                    headers = {"content-type": "application/json", "content-encoding": coding}
                    sent = await stack.send("POST", path, data=pack(given), headers=headers)
                    statuses.append(sent.status)
        assert (len(statuses), statuses.count(200) >= 40, max(statuses) < 500) == (126, True, True), statuses
        assert peers == []
        assert (await stack.send("POST", COMPLETIONS, json={"model": MODEL_NAME, "prompt": "a"})).status == 200
        # without a picker the same fields do both
        params = {"max_tokens": 2, "extra_args": {"kv_transfer_params": fetch}}
        generate = {"model": MODEL_NAME, "token_ids": [1] * 64, "sampling_params": params}
        asked = asyncio.create_task(asyncio.to_thread(pod.post, GENERATE, generate))
        await eventually(lambda: asyncio.sleep(0, len(peers)), bool, seconds=PATIENT_SECONDS)
        chat = {"model": MODEL_NAME, "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
        with suppress(OSError):
            assert pod.post(CHAT, chat | {"vllm_xargs": {"kv_transfer_params": ""}})[0] == 500
        await asyncio.gather(asked, return_exceptions=True)
        assert pod.process.has_ended(wait_seconds=PATIENT_SECONDS)

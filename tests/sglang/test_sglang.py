"""A pod of SGLang's own code beside a simulated vLLM pod: its load is known, and its prefixes are found page by page.

The pod is SGLang's prefix cache, event publisher and metrics (see `sglang_pod`), which a test can fill and empty at
will; `test_server.py` has the whole server. Its HTTP forms are those of its source, 0.5.23.
"""

import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_indexer.pools.event_sources import EventSourceDirectory
from kvmesh.errors import PodRefusesError
from kvmesh.pods.engine_metrics import parse_latencies, parse_load, parse_pod_report
from kvmesh.pods.page_steps import at_once
from kvmesh.pods.pod_http import PodPages
from kvmesh.pods.pod_key import PodKey
from tests.e2e.stack import Stack, eventually, free_ports, running_stack, simulated_pods
from tests.integration.keyed_pods import KEY, write_key
from tests.sglang.environment import ensure_sglang, without_gpu
from tests.vllm.environment import ensure_environment, ensure_model

HERE = Path(__file__).parent
TOKENIZER = HERE.parents[1] / "podsim" / "tiny_model"
PAGE = 16  # tokens
PROMPT = list(range(100, 100 + 10 * PAGE + 5))


class SglangPod:
    """The program, and a client for it."""

    def __init__(self, python: Path, model: Path, log: Path, *key: str) -> None:
        self.port, self.events, self.replay = free_ports(3)
        self.address = f"127.0.0.1:{self.port}"
        ports = map(str, (self.port, self.events, self.replay, PAGE))
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(python), str(HERE / "sglang_pod.py"), str(model), *ports, *key],
                env=without_gpu(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        assert self._answer() == {}, log.read_text()

    def do(self, **command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or '"it has ended"')

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangPod]:
    vllm = ensure_environment()
    model = ensure_model(vllm, tokenizer=TOKENIZER)
    running = SglangPod(ensure_sglang(vllm), model, tmp_path_factory.mktemp("sglang") / "pod.log")
    yield running
    running.end()


@pytest.fixture
async def stack(pod: SglangPod, tmp_path: Path) -> AsyncIterator[Stack]:
    """The mesh before this pod and a simulated vLLM pod; the indexer finds what the pod has stored before."""
    pod.do(clear=True)
    pod.do(serve=PROMPT)
    async with simulated_pods(1) as pods:
        endpoints = [pod.address, *pods]
        async with running_stack(tmp_path, settings="index_timeout_ms: 2000\n", endpoints=endpoints) as stack:
            yield stack


async def held_tokens(stack: Stack, pod: SglangPod, prompt: list[int], holds: Callable[[int], bool]) -> int:
    """Wait for what the index says of the pod, and return it."""

    async def look() -> int:
        explanation = await stack.explain({"model": "tiny", "prompt": prompt})
        (held,) = [each["matched_tokens"] for each in explanation["candidates"] if each["endpoint"] == pod.address]
        return int(held)

    return int(await eventually(look, holds))


async def test_its_prefixes_are_found_page_by_page_and_what_is_predicted_is_in_its_cache(
    stack: Stack, pod: SglangPod
) -> None:
    predicted = await held_tokens(stack, pod, PROMPT, lambda tokens: tokens > 0)
    assert predicted == 10 * PAGE
    assert pod.do(serve=PROMPT) == {"cached": predicted}
    branch = [*PROMPT[: 4 * PAGE + 3], *range(900, 900 + 5 * PAGE)]
    assert await held_tokens(stack, pod, branch, lambda tokens: tokens > 0) == 4 * PAGE
    assert pod.do(serve=branch) == {"cached": 4 * PAGE}
    assert await held_tokens(stack, pod, branch, lambda tokens: tokens > 4 * PAGE) == 9 * PAGE
    pod.do(evict=5 * PAGE)
    one, other = [await held_tokens(stack, pod, prompt, lambda tokens: tokens >= 0) for prompt in (PROMPT, branch)]
    assert sorted({one, other})[0] >= 4 * PAGE  # the shared pages are the last to go
    pod.do(clear=True)
    assert await held_tokens(stack, pod, PROMPT, lambda tokens: tokens == 0) == 0


async def test_its_load_is_known_beside_a_vllm_pod_s(stack: Stack, pod: SglangPod) -> None:
    pod.do(load={"running": 7, "waiting": 3, "usage": 0.75})

    async def look() -> Any:
        pod.do(serve=[1, 2, 3])  # numbers that stand still while requests run are those of a dead engine
        (shown,) = [each for each in (await stack.state())["endpoints"] if each["address"] == pod.address]
        return shown

    shown = await eventually(look, lambda shown: shown["waiting"] == 3)
    assert (shown["state"], shown["running"], shown["kv_usage"]) == ("ready", 7, 0.75)
    explanation = await stack.explain({"model": "tiny", "prompt": [1, 2, 3]})
    assert "load-unknown" not in explanation.get("degraded", ())
    # nothing is known of a prefix, and the vLLM pod is idle
    assert explanation["endpoint"] != pod.address
    pod.do(load={"running": 0, "waiting": 0, "usage": 0.0})


async def test_its_page_says_all_that_is_read(stack: Stack, pod: SglangPod) -> None:
    async with stack.http.get(f"http://{pod.address}/metrics") as response:
        page = await response.read()
    load = at_once(parse_load(page, reported_at=0.0))
    assert load is not None
    assert (load.kv_capacity_tokens, load.first_token_count > 0, load.inter_token_count) == (65536, True, 0)
    assert load.prefix_query_tokens > load.prefix_hit_tokens
    report = at_once(parse_pod_report(page, scraped_at=0.0))
    assert (report.block_size, list(report.engines or ())) == (PAGE, [0])
    first, _ = at_once(parse_latencies(page))
    assert first["tiny"].counts[-1] == load.first_token_count


async def test_with_a_key_all_but_its_metrics_want_it_and_the_indexer_shows_it(tmp_path: Path) -> None:
    """SGLang's own middleware guards also what is not there: it answers 401 where vLLM's events would be told."""
    vllm = ensure_environment()
    pod = SglangPod(ensure_sglang(vllm), ensure_model(vllm, tokenizer=TOKENIZER), tmp_path / "pod.log", KEY)
    without, given = PodPages(), PodPages(key=PodKey(write_key(tmp_path / "key", KEY)))
    try:
        metrics = await without.get(pod.address, "/metrics", timeout_seconds=5.0, max_body_bytes=1 << 20)
        assert metrics.status == 200
        with pytest.raises(PodRefusesError, match="/kv_event_sources: the pod wants a key: give --pod-key-file"):
            await EventSourceDirectory(pages=without, configured={}).find(pod.address)
        directory = EventSourceDirectory(pages=given, configured={})
        [(rank, found)] = (await directory.find(pod.address)).items()
        assert (rank, found.events) == (0, f"tcp://127.0.0.1:{pod.events}")
        assert await directory.first_model(pod.address) == "tiny"
    finally:
        without.close()
        given.close()
        pod.end()

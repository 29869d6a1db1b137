"""What the picker pays for a prompt's tokens, by model and way: `python -m bench.token_ways [--quick] [--out FILE]`.

Part of `make bench`. Three ways: the model's folder in this process; a pod's /tokenize; a pod's /render. The pod is a
simulated one in a process of its own, which tokenizes by `tokenizers` as vLLM does. Prompts of about 100, 1,000 and
8,000 tokens, each new, and then once more. CPU is this process's alone; the time is what a request waits.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from bench.machine import machine, revision, versions
from bench.tokenizing import RESULTS, SEED, folders, new_text
from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.pod_render import PodRender, RenderSettings
from extproc.prompts.tokenized_prompt import TOKEN_BYTES
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from operate.local.ports import pick_free_port

MODEL, PATH = "m", "/v1/completions"
SIZES = (100, 1000, 8000)  # tokens, about
ROUNDS, QUICK_ROUNDS = 15, 3
START_SECONDS = 60.0
POD = {"tokenize": ("--no-enable-scale-out",), "render": ("--enable-scale-out",)}
Ask = Callable[[bytes], Coroutine[Any, Any, int]]  # a body -> its tokens


def main() -> None:
    """Parse the flags, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-token-ways.json")
    arguments = parser.parse_args()
    began = datetime.now(UTC)
    models = []
    for name, folder in folders():
        measured = asyncio.run(ways_of(folder, rounds=QUICK_ROUNDS if arguments.quick else ROUNDS))
        models.append({"model": name, "ways": measured})
        for way, sizes in measured.items():
            print(f"{name:15} {way:9} {'  '.join(line(each) for each in sizes)}", flush=True)
    head = {"date": began.isoformat(timespec="seconds"), "machine": machine(), "versions": versions()}
    result = {**head, "kvmesh": revision(RESULTS.parent), "models": models}
    out = arguments.out or RESULTS / f"{began:%Y-%m-%d}-token-ways.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {out}")


async def ways_of(folder: Path, *, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Measure one model in each way."""
    tokenizer = ModelTokenizer.load(folder)

    async def here(body: bytes) -> int:
        return sum(map(len, tokenizer.token_buffers(parse_request(path=PATH, body=body)))) // TOKEN_BYTES

    sample = new_text(random.Random(SEED))
    words_a_token = len(sample.split(" ")) / await here(body_of(sample))
    found = {"folder": await measured(here, words_a_token, rounds=rounds)}
    for way, flags in POD.items():
        async with pod(folder, *flags) as address:
            asked = Asked(address)
            await asked(body_of("one that says which path there is"))
            found[way] = await measured(asked, words_a_token, rounds=rounds)
            asked.render.close()
    return found


class Asked:
    """Asks one pod for a prompt's tokens, and counts them."""

    def __init__(self, address: str) -> None:
        self._model = ServedModel(name=MODEL, tokens_from=TokensFrom.AUTO)
        self.render = PodRender(endpoints=lambda _: [address], settings=RenderSettings(timeout_seconds=30.0))

    async def __call__(self, body: bytes) -> int:
        request = parse_request(path=PATH, body=body)
        prompts = await self.render.prompts(request, body, model=self._model, limit=1)
        return len(prompts[0].tokens) // TOKEN_BYTES


async def measured(ask: Ask, words_a_token: float, *, rounds: int) -> list[dict[str, Any]]:
    """Return the medians for each size."""
    source = random.Random(SEED)
    lines = []
    for size in SIZES:
        costs: dict[str, list[float]] = {name: [] for name in ("new_cpu_ms", "new_ms", "again_cpu_ms", "again_ms")}
        tokens = 0
        for _ in range(rounds):
            body = body_of(" ".join(new_text(source).split(" ")[: round(size * words_a_token)]))
            for turn in ("new", "again"):
                cpu, began = time.process_time_ns(), time.perf_counter_ns()
                tokens = await ask(body)
                costs[f"{turn}_ms"].append((time.perf_counter_ns() - began) / 1e6)
                costs[f"{turn}_cpu_ms"].append((time.process_time_ns() - cpu) / 1e6)
        lines.append({"tokens": tokens, **{name: round(statistics.median(each), 4) for name, each in costs.items()}})
    return lines


@asynccontextmanager
async def pod(folder: Path, *flags: str) -> AsyncIterator[str]:
    """Run a simulated pod with the model's folder; yield its address."""
    port = pick_free_port(host="127.0.0.1", avoid=())
    own = ("--sim-port", str(port), "--tokenizer", str(folder), "--model", MODEL, "--max-model-len", "65536")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "podsim", *own, "--kv-blocks", "16384", *flags), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as http:
            while not await answers(http, f"http://127.0.0.1:{port}/health"):
                await asyncio.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Tell whether a page is there."""
    try:
        async with http.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def body_of(text: str) -> bytes:
    """Return a completion's body."""
    return json.dumps({"model": MODEL, "prompt": text}).encode()


def line(each: dict[str, Any]) -> str:
    """One size for a person: CPU and time, new/again."""
    cpu, wall = (f"{each[f'new_{what}']:.2f}/{each[f'again_{what}']:.2f}" for what in ("cpu_ms", "ms"))
    return f"{each['tokens']:5} tokens: CPU {cpu}, time {wall} ms"


if __name__ == "__main__":
    main()

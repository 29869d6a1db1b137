"""Pods with two data-parallel ranks behind one port: cache, load and expectations are each rank's own.

The pod is a front of two simulated pods, each with events of its own: it reads the header with the rank as vLLM 0.32
does, from 0 whatever its ranks are called, and deals requests without the header in turn.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.pools.plan_response import PREDICTED_HEADER
from tests.e2e.stack import Answer, Stack, eventually, free_ports, running_stack, simulated_pods

HOST = "127.0.0.1"
RANK = "x-data-parallel-rank"
NOT_FORWARDED = {"host", "content-length", "transfer-encoding", RANK}


class RankedPod:
    """The front; `ranks` are the names of its ranks, `asked` the headers so far."""

    def __init__(self, behind: list[str], *, ranks: tuple[int, ...], version: str) -> None:
        self.behind, self.ranks, self.version = behind, ranks, version
        self.asked: list[str | None] = []
        self.failed: set[int] = set()  # places whose engine is dead
        self.turn = itertools.count()
        self.http = aiohttp.ClientSession()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/version":
            return web.json_response({"version": self.version})
        if request.path == "/metrics":
            return web.Response(text="\n".join([await self._page(rank) for rank in self.ranks]))
        if request.path == "/kv_event_sources":
            return web.json_response({str(rank): await self._events(rank) for rank in self.ranks})
        named = request.headers.get(RANK)
        generates = request.method == "POST" and "token" not in request.path
        if generates:
            self.asked.append(named)
        at = 0 if not generates else next(self.turn) % len(self.behind) if named is None else int(named)
        if generates and at in self.failed:
            return web.json_response({"error": {"message": "EngineDeadError", "code": 500}}, status=500)
        if at >= len(self.behind):  # as vLLM 0.32 says it
            message = f"data_parallel_rank {at} is out of range [0, {len(self.behind)})."
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_FORWARDED}
        async with self.http.request(
            request.method,
            f"http://{self.behind[at]}{request.path_qs}",
            data=await request.read(),
            headers={**headers, "Accept-Encoding": "identity"},
        ) as got:
            answer = web.StreamResponse(status=got.status, headers={"content-type": got.headers["content-type"]})
            await answer.prepare(request)
            async for chunk in got.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer

    async def _page(self, rank: int) -> str:
        async with self.http.get(f"http://{self.behind[self.ranks.index(rank)]}/metrics") as page:
            text = re.sub(r'\bengine="0"', f'engine="{rank}"', await page.text())
        lines = [line for line in text.splitlines() if line.startswith(("vllm:", "#")) or rank == self.ranks[0]]
        return "\n".join(lines)

    async def _events(self, rank: int) -> Any:
        async with self.http.get(f"http://{self.behind[self.ranks.index(rank)]}/kv_event_sources") as sources:
            return (await sources.json())["0"]


@asynccontextmanager
async def mesh(
    tmp_path: Path, *, ranks: tuple[int, ...] = (0, 1), version: str = "0.32.0"
) -> AsyncIterator[tuple[Stack, RankedPod, str]]:
    """Start the mesh before one such pod, and wait until it knows the ranks."""
    (port,) = free_ports(1)
    address = f"{HOST}:{port}"
    async with simulated_pods(len(ranks)) as behind:
        pod = RankedPod(list(behind), ranks=ranks, version=version)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", pod.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, port).start()
            async with running_stack(tmp_path, endpoints=[address]) as stack:
                yield stack, pod, address
        finally:
            await runner.cleanup()
            await pod.http.close()


async def known(stack: Stack, *addresses: str) -> None:
    """Wait until these are the pool's endpoints, with their events and their load."""

    def are_ready(state: Any) -> bool:
        found = {each["address"]: each for each in state["endpoints"]}
        return found.keys() == set(addresses) and all(
            each["index_state"] == "live" and each["state"] == "ready" for each in found.values()
        )

    await eventually(stack.state, are_ready)


def document(number: int) -> list[int]:
    return [10 + number * 7 + token % 100 for token in range(1600)]


def predicted(answer: Answer) -> int:
    return int(answer.headers[PREDICTED_HEADER])


@pytest.mark.parametrize("ranks", [(0, 1), (4, 5)])
async def test_a_document_goes_to_the_rank_that_holds_it(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    async with mesh(tmp_path, ranks=ranks) as (stack, pod, address):
        await known(stack, *(f"{address}#{rank}" for rank in ranks))
        for number in range(6):
            first = await stack.complete(document(number))
            assert (first.status, predicted(first), first.cached_tokens) == (200, 0, 0)
            await stack.indexed(document(number), tokens=1584)
            held_at = pod.asked[-1]
            again = await stack.complete(document(number))
            assert (predicted(again), again.cached_tokens) == (1584, 1584)
            assert held_at is not None and pod.asked[-1] == held_at
        assert set(pod.asked) == {"0", "1"}, "each rank got some"
        explained = await stack.explain({"model": "tiny", "prompt": document(0)})
        assert explained["endpoint"] in {f"{address}#{rank}" for rank in ranks}
        chosen = next(each for each in explained["candidates"] if each["endpoint"] == explained["endpoint"])
        assert chosen["indexed_tokens"] == 1584
        # clients cannot choose it
        other = "1" if pod.asked[0] == "0" else "0"
        body = {"model": "tiny", "prompt": document(0), "max_tokens": 1}
        await stack.send("POST", "/v1/completions", json=body, headers={RANK: other})
        assert pod.asked[-1] == pod.asked[0]


async def test_a_busy_rank_gets_less_than_its_twin(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (stack, pod, address):
        await known(stack, f"{address}#0", f"{address}#1")
        await asyncio.gather(*(stack.complete(document(number), max_tokens=20) for number in range(8)))
        assert pod.asked.count("0") == pod.asked.count("1") == 4
        state = await stack.state()
        assert sum(each["bookings"] for each in state["endpoints"]) == 0


async def test_a_failed_rank_is_left_out_and_the_other_serves(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (stack, pod, address):
        await known(stack, f"{address}#0", f"{address}#1")
        pod.failed.add(1)
        statuses = [(await stack.complete(document(number)[:100])).status for number in range(20)]
        assert statuses.count(500) <= 5
        assert statuses[-10:] == [200] * 10
        found = {each["address"]: each["avoided"] for each in (await stack.state())["endpoints"]}
        assert found[f"{address}#0"] is None
        assert "failed" in found[f"{address}#1"]


async def test_the_ranks_of_an_old_version_are_dealt_by_the_pod(tmp_path: Path) -> None:
    async with mesh(tmp_path, version="0.10.2") as (stack, pod, address):
        await known(stack, address)
        found = []
        for turn in range(4):  # two at each rank
            answer = await stack.complete(document(0))
            found.append((predicted(answer), answer.cached_tokens))
            if turn < 2:
                await eventually(stack.state, has_cached(100 * (turn + 1)))
        assert found == [(0, 0), (0, 0), (1584, 1584), (1584, 1584)], "predicted is what every rank has"
        assert pod.asked == [None] * 4


async def test_an_api_without_the_header_counts_on_what_every_rank_has(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (stack, pod, address):
        await known(stack, f"{address}#0", f"{address}#1")
        await stack.complete(document(0))
        await stack.indexed(document(0), tokens=1584)
        path, body = "/inference/v1/generate", {"token_ids": document(0), "sampling_params": {"max_tokens": 2}}
        explained = await stack.explain(body, path=path)
        assert [each["indexed_tokens"] for each in explained["candidates"]] == [0, 0]
        answer = await stack.send("POST", path, json=body)  # a simulated pod does not have it
        assert (predicted(answer), pod.asked[-1]) == (0, None)


def has_cached(blocks: int) -> Callable[[Any], bool]:
    return lambda state: sum(each["cached_blocks"] for each in state["endpoints"]) >= blocks

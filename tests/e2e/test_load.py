"""`kvmesh load` against a whole mesh: the effect beside round robin, a trace, a burst, and a pod that is killed."""

import asyncio
import json
import os
import shlex
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.stack import Stack, eventually, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN_SECONDS = 90.0
SMALL = ("--rate", "6", "--duration", "6s", "--users", "6", "--prompt-tokens", "600", "--answer-tokens", "8")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the mesh lives."""
    return tmp_path_factory.mktemp("load")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(folder: Path) -> AsyncIterator[Stack]:
    """A mesh of its own: pods are killed in it."""
    async with running_stack(folder) as running:
        yield running


async def start(folder: Path, *words: str) -> asyncio.subprocess.Process:
    gateway = json.loads((folder / "ready.json").read_text())["gateway"]
    command = (sys.executable, "-m", "operate", "load", "--server", gateway, "-o", "json", *words)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


async def end(process: asyncio.subprocess.Process) -> tuple[int | None, Any]:
    async with asyncio.timeout(RUN_SECONDS):
        output, errors = await process.communicate()
    assert errors == b"", errors.decode()
    return process.returncode, json.loads(output)


async def test_the_requests_of_the_greeting_are_cold_warm_and_half_warm(mesh: Stack, folder: Path) -> None:
    lines = [shlex.split(line) for line in (folder / "up.log").read_text().splitlines() if line.startswith("curl ")]
    bodies = [json.loads(Path(words[-1].removeprefix("@")).read_text()) for words in lines]
    assert {words[2] for words in lines} == {f"{mesh.ready['gateway']}/v1/chat/completions"}

    cold, warm, shared = [await mesh.send("POST", "/v1/chat/completions", json=body) for body in bodies]

    assert [answer.status for answer in (cold, warm, shared)] == [200, 200, 200]
    assert cold.cached_tokens == 0
    assert warm.cached_tokens > shared.cached_tokens > 16
    assert cold.json["usage"]["prompt_tokens"] - warm.cached_tokens < 32  # two blocks
    assert cold.upstream == warm.upstream
    assert cold.json["choices"][0]["message"]["content"].startswith(" [simulated] ")


async def test_the_same_questions_find_more_in_the_caches_than_by_round_robin(mesh: Stack, folder: Path) -> None:
    picks = await mesh.metric("kvmesh_picks_total")

    status, report = await end(await start(folder, *SMALL, "--beside", "round-robin"))

    ours, in_turn = report["arms"]
    assert (status, ours["arm"], in_turn["arm"]) == (0, "kvmesh", "round-robin")
    assert ours["hit_rate"] > in_turn["hit_rate"] + 0.2
    assert ours["answered"] == in_turn["answered"] == ours["requests"] > 10
    assert set(in_turn["servers"]) == set(mesh.ready["endpoints"])
    assert sum(ours["servers"].values()) == ours["answered"]
    assert await mesh.metric("kvmesh_picks_total") - picks == ours["answered"] + ours["warm_up"]


async def test_a_second_run_finds_nothing_of_the_first(mesh: Stack, folder: Path) -> None:
    words = ("burst", "--rate", "5", "--duration", "1s", "--prompt-tokens", "400", "--answer-tokens", "2")

    async def hit_rate() -> float:
        _, report = await end(await start(folder, *words))
        return float(report["arms"][0]["hit_rate"])

    first, again = await hit_rate(), await hit_rate()
    assert 0.0 < again < first + 0.1 < 0.9


async def test_a_trace_is_replayed_at_the_rate(mesh: Stack, folder: Path) -> None:
    trace = folder / "trace.jsonl"
    rows = [
        {
            "timestamp": 60_000 * i,
            "input_length": 1600,
            "output_length": 80,
            "hash_ids": [0, 1 + i % 3, 9 + i % 3, 30 + i],
        }
        for i in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    status, report = await end(await start(folder, "trace", str(trace), "--rate", "10", "--shrink", "8"))

    (arm,) = report["arms"]
    assert (status, arm["answered"], report["model"]) == (0, 20, "tiny")
    assert 20 * 190 < arm["prompt_tokens"] < 20 * 230  # 1600 / 8, the salt, and what the tokenizer makes of it
    assert arm["hit_rate"] > 0.5


async def test_a_pod_that_is_killed_costs_what_it_was_answering_and_no_more(mesh: Stack, folder: Path) -> None:
    victim, pid = mesh.ready["endpoints"][1], mesh.ready["pids"]["pod-1"]
    served = await mesh.metric("kvmesh_picks_total")
    process = await start(folder, *SMALL[:2], "--duration", "10s", *SMALL[4:])
    await eventually(lambda: mesh.metric("kvmesh_picks_total"), lambda picks: picks > served + 10)

    os.kill(pid, signal.SIGKILL)

    async def facts() -> Any:
        return json.loads((folder / "ready.json").read_text())

    again = await eventually(facts, lambda found: found["pids"]["pod-1"] != pid, seconds=30.0)
    assert again["pids"] == mesh.ready["pids"] | {"pod-1": again["pids"]["pod-1"]}
    _, report = await end(process)
    (arm,) = report["arms"]
    assert arm["answered"] + arm["failed"] == arm["requests"]
    assert arm["refused"] == 0
    # what was in flight at the pod: an answer that has begun cannot be begun again elsewhere
    assert arm["failed"] <= 6
    assert set(arm["failed_at"]) <= {victim, mesh.ready["gateway"].removeprefix("http://")}
    words = (folder / "up.log").read_text()
    assert f"pod-1 ({victim}) was killed by SIGKILL and starts again in 5 s" in words
    assert f"pod-1 ({victim}) is ready again, as process {again['pids']['pod-1']}" in words

    async def reached() -> Any:
        answers = [await mesh.complete(f"{i} a prompt that nobody has seen", max_tokens=1) for i in range(4)]
        return {answer.upstream for answer in answers if answer.status == 200}

    await eventually(reached, lambda pods: victim in pods, seconds=30.0)


async def test_chaos_kills_pods_by_itself_and_requests_go_on(tmp_path: Path) -> None:
    async with running_stack(tmp_path, "--chaos", "1") as mesh:
        first = mesh.ready["pids"]
        status = [200]

        async def facts() -> Any:
            prompt = f"The sea, again and again, {len(status)}"  # one under which a pod dies is refused for a minute
            status.append((await mesh.complete(prompt, max_tokens=1)).status)
            return json.loads((tmp_path / "ready.json").read_text())["pids"]

        changed = await eventually(facts, lambda pids: pids != first, seconds=60.0)

        assert {name for name in first if changed[name] != first[name]} <= {"pod-0", "pod-1", "pod-2"}
        assert status.count(200) >= len(status) - 2  # one may be under way at a kill
        assert "was killed by SIGKILL and starts again" in (tmp_path / "up.log").read_text()

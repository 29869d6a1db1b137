"""`kvmesh load` as a user calls it, against servers that do what they are told."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from operate.local.ports import pick_free_port

HOST = "127.0.0.1"
DEADLINE_SECONDS = 60.0
SMALL = ("--rate", "20", "--duration", "2s", "--users", "4", "--prompt-tokens", "20", "--answer-tokens", "3")
PIECE = b'data: {"choices": [{"delta": {"content": " a"}}]}\n\n'
END = (
    b'data: {"choices": [], "usage": {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
    b"data: [DONE]\n\n"
)

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def answer_well(request: web.Request) -> web.StreamResponse:
    return await stream(request, PIECE, PIECE, END)


async def stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-kvmesh-upstream": "10.0.0.1:8000"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


@asynccontextmanager
async def server(answer: Answer, bodies: list[Any] | None = None, *, models: Any = None) -> AsyncIterator[str]:
    """Yield the URL of a server with one model."""

    async def chat(request: web.Request) -> web.StreamResponse:
        if bodies is not None:
            bodies.append((request.path, dict(request.headers), await request.json()))
        return await answer(request)

    async def cards(_: web.Request) -> web.Response:
        return models or web.json_response({"data": [{"id": "some-model"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/completions", chat)
    app.router.add_get("/v1/models", cards)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = pick_free_port(host=HOST, avoid=())
    await web.TCPSite(runner, HOST, port).start()
    try:
        yield f"http://{HOST}:{port}"
    finally:
        await runner.cleanup()


async def start(*words: str, tmp_path: Path) -> asyncio.subprocess.Process:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # no demo of the developer's is met
    command = (sys.executable, "-m", "operate", "load", *words)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=environment)


async def load(*words: str, tmp_path: Path) -> tuple[int | None, str, str]:
    process = await start(*words, tmp_path=tmp_path)
    async with asyncio.timeout(DEADLINE_SECONDS):
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_json_says_what_the_clients_saw_and_nothing_else_is_printed(tmp_path: Path) -> None:
    bodies: list[Any] = []
    async with server(answer_well, bodies) as url:
        status, output, errors = await load(
            "--server", url, *SMALL, "--header", "X-Objective: critical", "-o", "json", tmp_path=tmp_path
        )

    report = json.loads(output)
    (arm,) = report["arms"]
    assert (status, errors) == (0, "")
    assert (report["model"], report["interrupted"]) == ("some-model", False)
    assert (arm["arm"], arm["answered"], arm["hit_rate"]) == (url.removeprefix("http://"), arm["requests"], 0.4)
    assert arm["answered"] + arm["warm_up"] == len(bodies)
    assert arm["servers"] == {"10.0.0.1:8000": arm["answered"]}
    path, headers, body = bodies[0]
    assert (path, headers["x-objective"]) == ("/v1/chat/completions", "critical")
    assert (body["model"], body["stream"], body["max_tokens"]) == ("some-model", True, 3)


async def test_both_arms_get_the_same_questions_with_other_first_words(tmp_path: Path) -> None:
    ours: list[Any] = []
    theirs: list[Any] = []
    async with server(answer_well, ours) as one, server(answer_well, theirs) as other:
        status, output, _ = await load("--server", one, "--beside", other, *SMALL, tmp_path=tmp_path)

    assert status == 0, output
    assert "TTFT p50" in output
    assert "\x1b" not in output
    chats = [[body["messages"] for _, _, body in bodies] for bodies in (ours, theirs)]
    first, second = ({chat[0]["content"] for chat in arm} for arm in chats)
    assert first.isdisjoint(second)
    assert {tail(content) for content in first} == {tail(content) for content in second}
    assert sorted(chat[-1]["content"] for chat in chats[0]) == sorted(chat[-1]["content"] for chat in chats[1])


def tail(content: str) -> str:
    """Return the text without its salt."""
    return content.split(" ", 4)[4]


async def test_refusals_and_failures_are_told_apart_by_their_reasons(tmp_path: Path) -> None:
    number = 0

    async def mixed(request: web.Request) -> web.StreamResponse:
        nonlocal number
        number += 1
        if number % 4 == 0:
            return web.json_response(
                {"error": {"message": "later"}}, status=503, headers={"x-kvmesh-reason": "overload"}
            )
        if number % 4 == 1:
            return web.json_response({"error": {"message": "no memory"}}, status=500)
        return await stream(request, PIECE, END) if number % 4 == 2 else await stream(request, PIECE)

    async with server(mixed) as url:
        status, output, _ = await load("--server", url, *SMALL, "-o", "json", tmp_path=tmp_path)

    (arm,) = json.loads(output)["arms"]
    assert status == 1
    assert set(arm["refusals"]) == {"overload"}
    assert set(arm["errors"]) == {"status 500: no memory", "the answer broke off"}
    assert arm["answered"] + arm["refused"] + arm["failed"] == arm["requests"]
    assert min(arm["answered"], arm["refused"], arm["failed"]) > 0


async def test_a_pod_that_is_away_is_passed_over_by_round_robin(tmp_path: Path) -> None:
    away = pick_free_port(host=HOST, avoid=())
    async with server(answer_well) as one, server(answer_well) as other:
        pods = ",".join(url.removeprefix("http://") for url in (one, f"http://{HOST}:{away}", other))
        status, output, _ = await load(
            "--server", one, "--beside", "round-robin", "--endpoints", pods, *SMALL, "-o", "json", tmp_path=tmp_path
        )

    _, in_turn = json.loads(output)["arms"]
    assert (status, in_turn["arm"], in_turn["failed"]) == (0, "round-robin", 0)


async def test_ctrl_c_shows_what_came_so_far(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if len(body["messages"]) > 2:  # a second question
            asked.set()
            await asyncio.Event().wait()
        return await stream(request, PIECE, END)

    async with server(hang) as url:
        process = await start("--server", url, *SMALL, "-o", "json", tmp_path=tmp_path)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await asked.wait()
            process.send_signal(signal.SIGINT)
            output, errors = await process.communicate()

    report = json.loads(output)
    assert (process.returncode, errors.decode(), report["interrupted"]) == (130, "", True)
    assert report["arms"][0]["unfinished"] > 0


async def test_a_server_that_is_away_or_refuses_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    away = f"http://{HOST}:{pick_free_port(host=HOST, avoid=())}"
    status, output, errors = await load("--server", away, tmp_path=tmp_path)
    assert (status, output) == (1, "")
    assert errors.startswith(f"kvmesh: nobody answers at {away}: connection refused; start a demo with `kvmesh up`")

    bodies: list[Any] = []
    async with server(answer_well, bodies, models=web.json_response({"error": "Unauthorized"}, status=401)) as url:
        status, _, errors = await load("--server", url, tmp_path=tmp_path)
    assert (status, bodies) == (1, [])
    assert errors == f"kvmesh: {url}/v1/models refuses (status 401): if it wants a key, give --pod-key-file\n"

    async with server(answer_well, bodies, models=web.Response(text="hello")) as url:
        status, _, errors = await load("--server", url, tmp_path=tmp_path)
    assert (status, bodies) == (1, [])
    assert errors == f"kvmesh: {url}/v1/models names no model (status 200: hello); give --model\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("trace",), "`kvmesh load trace FILE` needs a file"),
        (("questions", "file.jsonl"), "questions takes no file: file.jsonl"),
        (("trace", "/nowhere.jsonl"), "cannot read /nowhere.jsonl: No such file or directory"),
        (("trace", "/dev/zero"), "/dev/zero:1: JSON is malformed"),
        (("--duration", "soon"), "--duration 'soon': a duration up to 7d is needed"),
        (("--duration", "1s"), "--duration 1s: 24 users at 8 requests a second"),
        (("--header", "nothing"), "--header 'nothing': NAME:VALUE is needed"),
        (("--server", "http://["), "is not a URL"),
        (("--beside", "least-request"), "--beside least-request: round-robin, or a URL"),
        (("--beside", "round-robin"), "no `kvmesh up` with this gateway runs here"),
    ],
)
async def test_wrong_usage_is_one_line_with_exit_status_2(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    status, output, errors = await load(*words, tmp_path=tmp_path)
    assert (status, output) == (2, "")
    assert says in errors
    assert "Traceback" not in errors


async def test_recorded_bodies_are_sent_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "bodies.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"question {i}"}], "max_tokens": 2, "top_p": 0.5} for i in range(3)
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    bodies: list[Any] = []
    async with server(answer_well, bodies) as url:
        status, output, _ = await load("trace", str(file), "--server", url, "--rate", "50", tmp_path=tmp_path)

    assert status == 0, output
    assert {body["top_p"] for _, _, body in bodies} == {0.5}
    assert sorted(body["messages"][0]["content"].split(" ", 4)[4] for _, _, body in bodies) == [
        f"question {i}" for i in range(3)
    ]

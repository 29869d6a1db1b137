"""`kvmesh top` against replicas that come and go: a real picker and pages that are told what to say."""

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from typer.testing import CliRunner

from extproc.pages.picker_state import PickerState
from kvmesh.admin.admin_login import AdminLogin
from operate.local.ports import pick_free_port
from operate.local.top_commands import app
from operate.local.top_view import Look, Replica, follow, look_once, show_live
from tests.integration.kv_redis import RedisServer
from tests.integration.live_picker import DEADLINE_SECONDS, HOST, PODS, live_picker

PAGE: dict[str, Any] = {
    "now": 1.0,
    "endpoints": [{"address": "p:1", "state": "ready", "picks": 3, "share": 1.0, "bookings": 1}],
    "index": {"state": "ok", "sources": 1},
    "decisions": [],
}
TOKEN = "a-token-of-more-than-16-bytes"


@asynccontextmanager
async def replica(port: int, *, token: str | None = None) -> AsyncIterator[None]:
    """Serve the page, to whoever shows the token."""

    async def state(request: web.Request) -> web.Response:
        if token is not None and request.headers.get("authorization") != f"Bearer {token}":
            return web.json_response({"error": "show a token"}, status=401)
        return web.json_response(PAGE)

    app = web.Application()
    app.router.add_get("/state", state)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, HOST, port, reuse_address=True).start()
    try:
        yield
    finally:
        await runner.cleanup()


class Seen:
    """What was shown last."""

    def __init__(self) -> None:
        self.replicas: Sequence[Replica] = ()
        self.state: PickerState | None = None
        self._changed = asyncio.Event()

    def __call__(self, replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        self.replicas, self.state = replicas, state
        self._changed.set()

    async def until(self, *problems: bool) -> None:
        """Wait until just these replicas have a problem."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while tuple(each.problem is not None for each in self.replicas) != problems or not all(
                each.problem or each.state for each in self.replicas
            ):
                self._changed.clear()
                await self._changed.wait()


async def test_replicas_are_added_up_one_that_is_lost_stays_with_its_age_and_comes_back() -> None:
    ports = [pick_free_port(host=HOST, avoid=()) for _ in range(2)]
    urls, seen = [f"http://{HOST}:{port}" for port in ports], Seen()
    async with replica(ports[0]):
        async with replica(ports[1]):
            following = asyncio.create_task(follow(urls, pool=None, login=AdminLogin(), show=seen), name="top")
            await seen.until(False, False)
            assert seen.state is not None
            assert (seen.state.endpoints[0].picks, seen.state.endpoints[0].bookings) == (6, 2)

        await seen.until(False, True)
        lost = seen.replicas[1]
        assert lost.state is not None
        assert lost.heard_at is not None
        assert seen.state is not None
        assert seen.state.endpoints[0].picks == 6  # what it said last

        async with replica(ports[1]):
            await seen.until(False, False)
        following.cancel()
        await asyncio.wait([following])


async def test_a_real_pickers_state_is_drawn_on_a_terminal(redis_server: RedisServer) -> None:
    console = Console(file=StringIO(), width=100, height=24, force_terminal=True, color_system=None)
    async with live_picker(redis_server.url) as picker:
        (await picker.ask("hello world " * 40)).finish()
        following = asyncio.create_task(
            show_live([picker.admin], pool=None, login=AdminLogin(), console=console, look=Look()), name="top"
        )
        assert isinstance(console.file, StringIO)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while "1 of 1 replicas connected" not in console.file.getvalue():
                await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.wait([following])

    shown = console.file.getvalue()
    assert all(pod in shown for pod in PODS)
    assert "/v1/completions" in shown
    assert "api_key" not in shown


async def test_a_missing_token_is_said_in_the_pages_words_and_the_right_one_opens_it(tmp_path: Path) -> None:
    port = pick_free_port(host=HOST, avoid=())
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    async with replica(port, token=TOKEN):
        (without,) = await look_once([f"http://{HOST}:{port}"], pool=None, login=AdminLogin())
        (shown,) = await look_once([f"http://{HOST}:{port}"], pool=None, login=AdminLogin(token_file=file))

    assert without.problem == f"GET http://{HOST}:{port}/state: status 401: show a token"
    assert TOKEN not in str(without)
    assert (shown.problem, shown.state is not None) == (None, True)


async def test_once_prints_the_page_or_json_and_ends(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker:
        (await picker.ask("hello world " * 40)).finish()
        text = await asyncio.to_thread(CliRunner().invoke, app, ["--once", "--picker", picker.admin])
        as_json = await asyncio.to_thread(
            CliRunner().invoke, app, ["--once", "-o", "json", "--picker", f"{picker.admin}/,{picker.admin}"]
        )

    assert (text.exit_code, as_json.exit_code) == (0, 0)
    assert PODS[0] in text.stdout
    assert "1 of 1 replicas connected" in text.stdout
    found = json.loads(as_json.stdout)
    assert [line["url"] for line in found["replicas"]] == [picker.admin]
    assert [endpoint["address"] for endpoint in found["state"]["endpoints"]] == list(PODS)


async def test_a_terminal_that_has_no_such_signs_or_cannot_be_drawn_over_gets_what_it_can_take(
    redis_server: RedisServer,
) -> None:
    async with live_picker(redis_server.url) as picker:
        (await picker.ask("hello world " * 40, request_id="r")).finish()
        ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
        command = [
            sys.executable,
            "-c",
            "from operate.local.top_commands import app; app()",
            "--picker",
            picker.admin,
        ]
        further = ("--once", "--picker", f"http://{HOST}:1/é")
        once = await asyncio.create_subprocess_exec(*command, *further, stdout=PIPE, stderr=PIPE, env=ascii_only)
        async with asyncio.timeout(DEADLINE_SECONDS):
            page, errors = await once.communicate()
        assert (once.returncode, b"?" in page, errors) == (0, True, b"")  # the address of a replica

        leader, follower = pty.openpty()
        drawing = await asyncio.create_subprocess_exec(
            *command, stdin=follower, stdout=follower, stderr=follower, env=ascii_only
        )
        os.close(follower)
        async with asyncio.timeout(DEADLINE_SECONDS):
            line = await asyncio.to_thread(os.read, leader, 4096)
        drawing.send_signal(signal.SIGINT)
        await drawing.wait()
        os.close(leader)
    assert b"hello" not in line
    assert b"-> 10.0.0." in line


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
async def test_a_terminal_that_is_not_read_does_not_keep_it_from_ending(terminal: str, ending: signal.Signals) -> None:
    nowhere = f"http://{HOST}:{pick_free_port(host=HOST, avoid=())}"
    code = "from operate.local.top_commands import app; app()"
    leader, follower = pty.openpty()
    fill = os.open(os.ttyname(follower), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        drawing = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, "--picker", nowhere),
            stdin=follower,
            stdout=follower,
            stderr=PIPE,
            env={**os.environ, "TERM": terminal},
        )
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await asyncio.to_thread(select.select, [leader], [], [], 0.1) >= ([leader],):
                assert drawing.returncode is None
        with suppress(BlockingIOError):
            while True:
                os.write(fill, b"x" * 4096)  # nothing that it draws from now on fits in
        drawing.send_signal(ending)
        async with asyncio.timeout(DEADLINE_SECONDS):
            _, errors = await drawing.communicate()
    finally:
        for descriptor in (leader, follower, fill):
            os.close(descriptor)
    assert b"Traceback" not in errors
    assert drawing.returncode == (0 if ending is signal.SIGINT else -signal.SIGTERM)


@pytest.mark.parametrize("form", [[], ["-o", "json"]])
def test_once_without_an_answer_says_why_and_fails(form: list[str]) -> None:
    url = f"http://{HOST}:{pick_free_port(host=HOST, avoid=())}"

    ended = CliRunner().invoke(app, ["--once", "--picker", url, *form])

    assert ended.exit_code == 1
    assert "Cannot connect to host" in ended.stdout


def test_a_pool_is_written_as_for_every_command_and_one_at_a_time() -> None:
    ended = CliRunner().invoke(app, ["--once", "--pool", "llm/a", "--pool", "llm/b"])

    assert ended.exit_code != 0
    assert "2 pools are named (llm/a, llm/b)" in str(ended.exception)


@pytest.mark.parametrize("pool", ["", "pool: llm/chat\n"])
def test_a_settings_file_may_name_one(tmp_path: Path, pool: str) -> None:
    url = f"http://{HOST}:{pick_free_port(host=HOST, avoid=())}"
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"picker: {url}\n{pool}")

    command = [sys.executable, "-m", "operate", "top", "--once", "-o", "json", "--config", str(settings)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert [line["url"] for line in json.loads(ended.stdout)["replicas"]] == [url]

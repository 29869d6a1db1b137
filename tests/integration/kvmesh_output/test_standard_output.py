"""Every command that prints ends without a traceback where its output is full or nobody reads it: real processes."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from operate.local.ports import pick_free_port
from tests.integration.kv_redis import RedisServer
from tests.integration.live_picker import live_picker
from tests.integration.operate_local.test_processes_up import arguments, free_ports

KVMESH = str(Path(sys.executable).with_name("kvmesh"))
DEADLINE_SECONDS = 60.0
FAILED, CLOSED_PIPE = 1, 141
ALONE = (
    "version",
    "--version",
    "--help",
    "install",
    "audit",
    "check",
    "policy",
    "doctor",
)
WITH_REDIS = ("sources", "size", "verify", "lookup", "read")
WITH_PICKER = ("explain", "top", "top-once", "top-json", "plan")
POOL = ("--pool", "llm/a", "--gateway", "llm/g", "--hostname", "a.example")
INSTALL = (*POOL, "--no-preflight", "--istio-version", "1.30.0")
POLICY = "apiVersion: kvmesh.io/v1alpha1\nkind: InferencePolicy\nmetadata: {name: a, namespace: llm}\nspec: {}\n"


def words(name: str, folder: Path, *, redis: str = "", picker: str = "") -> list[str]:
    """Return the command line of a command that prints something."""
    (folder / "policies").mkdir(exist_ok=True)
    (folder / "policies" / "policy.yaml").write_text(POLICY, encoding="utf-8")
    (folder / "ids.json").write_text("[1, 2, 3]", encoding="utf-8")
    (folder / "body.json").write_text('{"model": "tiny", "prompt": "hello"}', encoding="utf-8")
    (folder / "log").write_text("no chain\n", encoding="utf-8")
    nowhere = "127.0.0.1:1"
    return {
        "version": ["version"],
        "--version": ["--version"],
        "--help": ["index", "--help"],
        "install": ["install", "--dry-run", "--image", "kvmesh:1", *INSTALL],
        "audit": ["audit", "verify", str(folder / "log")],
        "check": ["policy", "check", str(folder / "policies" / "policy.yaml")],
        "policy": ["policy", "explain", "--policies", str(folder / "policies")],
        "doctor": ["doctor", "--endpoints", nowhere, "--redis", f"redis://{nowhere}", "--no-trial"],
        "sources": ["index", "sources", "--redis", redis],
        "size": ["index", "size", "--redis", redis],
        "verify": ["index", "verify", "--redis", redis],
        "lookup": ["index", "lookup", str(folder / "ids.json"), "--model", "tiny", "--redis", redis],
        "read": ["audit", "read", "--redis", redis, "--stream", "audit"],
        "explain": ["explain", str(folder / "body.json"), "--picker", picker],
        "top": ["top", "--picker", picker],
        "top-once": ["top", "--once", "--picker", picker],
        "top-json": ["top", "-o", "json", "--picker", picker],
        "plan": ["plan", "--picker", picker],
    }[name]


async def run(command: Sequence[str], *, stdout: int) -> tuple[int | None, str]:
    """Run it to its end, and return its exit code and what it said on standard error."""
    process = await asyncio.create_subprocess_exec(
        KVMESH, *command, stdout=stdout, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            _, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    return process.returncode, errors.decode()


async def ends_well(command: Sequence[str]) -> None:
    """Run it against a full device, and against a pipe that nobody reads any more."""
    full = os.open("/dev/full", os.O_WRONLY)
    reading, unread = os.pipe()
    os.close(reading)
    try:
        code, errors = await run(command, stdout=full)
        assert (code, errors.splitlines()) == (
            FAILED,
            ["kvmesh: standard output cannot be written: No space left on device"],
        )
        assert await run(command, stdout=unread) == (CLOSED_PIPE, "")
    finally:
        os.close(full)
        os.close(unread)


async def test_what_waits_for_news_ends_when_its_reader_goes() -> None:
    nobody = f"http://127.0.0.1:{pick_free_port(host='127.0.0.1', avoid=())}"  # so that there is no news
    reading, written = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(KVMESH, "top", "--picker", nobody), stdout=written, stdin=asyncio.subprocess.DEVNULL
    )
    os.close(written)
    try:
        assert await asyncio.to_thread(os.read, reading, 1 << 16)  # it has told all there is
        os.close(reading)
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await process.wait() == CLOSED_PIPE
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.parametrize("name", ALONE)
async def test_a_command_that_asks_nobody(name: str, tmp_path: Path) -> None:
    await ends_well(words(name, tmp_path))


@pytest.mark.parametrize("name", WITH_REDIS)
async def test_a_command_that_asks_redis(name: str, tmp_path: Path, redis_server: RedisServer) -> None:
    command = words(name, tmp_path, redis=redis_server.url)
    if name == "read":
        from extproc.ledger.record_targets import FIELD, stream_key

        redis_server.client().xadd(stream_key("audit"), {FIELD: b"{}"})
    await ends_well(command)


@pytest.mark.parametrize("name", WITH_PICKER)
async def test_a_command_that_asks_a_picker(name: str, tmp_path: Path, redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker:
        (await picker.ask("hello world " * 40)).finish()
        await ends_well(words(name, tmp_path, picker=picker.admin))


async def test_a_mesh_of_up_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    await ends_well(["up", "--pods", "1", *arguments(free_ports())])
    assert list(tmp_path.iterdir()) == []

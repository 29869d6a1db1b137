"""Commands that ask admin pages show their token and certificate to these, and to nobody else."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from extproc.errors import KvmeshError
from extproc.pages.admin_http import AdminServer
from extproc.pages.admin_pages import PickerPages
from extproc.reach.view import ask_picker
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.admin.admin_login import AdminLogin
from operate.doctor.examine import DoctorSettings, gather
from operate.local.commands import app as commands
from operate.local.explain import ask
from operate.local.ports import pick_free_port
from operate.policy.commands import app as policy_commands
from tests.integration.admin_doors import HOST
from tests.integration.doctor_mesh import picker_settings, two_ports
from tests.integration.kv_tls import make_authority, make_certificate

TOKEN = "correct-horse-battery"
EXPLAINED = {
    "endpoint": "10.0.0.1:8000",
    "fallbacks": [],
    "prompt_tokens": 1,
    "matched_tokens": 0,
    "degraded": [],
    "candidates": [],
}
POLICIES: dict[str, Any] = {"pools": [], "policies": [], "problems": []}


class Pages:
    """What the commands look at."""

    async def explain(self, facts: object, body: bytes, *, pool: str | None = None) -> dict[str, Any]:
        return EXPLAINED

    async def policies(self, target: str | None) -> dict[str, Any]:
        return POLICIES

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        return True, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A picker's admin pages behind TLS and a token, and the flags that open them."""

    url: str
    flags: tuple[str, ...]
    login: AdminLogin


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[Guarded]:
    authority = make_authority(folder)
    certificate = make_certificate(folder, "localhost", authority=authority)
    (folder / "token").write_text(f"{TOKEN}\n")
    access = AdminAccess(token_file=folder / "token", tls=certificate.files)
    server = AdminServer(cast("PickerPages", Pages()), max_body_bytes=1024, access=access)
    port = pick_free_port(host=HOST, avoid=())
    try:
        await server.start(host=HOST, port=port)
        yield Guarded(
            url=f"https://localhost:{port}",
            flags=("--token-file", str(folder / "token"), "--ca", str(authority.cert)),
            login=AdminLogin(token_file=folder / "token", ca_file=authority.cert),
        )
    finally:
        await server.stop()


async def call(app: Any, *arguments: str) -> Result:
    """Run a command in a thread: the server needs the loop."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


async def test_explain_and_policy_explain_get_in_by_their_flags(tmp_path: Path) -> None:
    (tmp_path / "body.json").write_text('{"prompt": "hello"}')
    async with guarded(tmp_path) as picker:
        explained = await call(
            commands, "explain", str(tmp_path / "body.json"), "-o", "json", "--picker", picker.url, *picker.flags
        )
        assert (explained.exit_code, json.loads(explained.stdout)) == (0, EXPLAINED)
        policies = await call(policy_commands, "policy", "explain", "-o", "json", "--picker", picker.url, *picker.flags)
        assert (policies.exit_code, json.loads(policies.stdout)) == (0, POLICIES)


async def test_who_is_not_let_in_reads_what_is_missing(tmp_path: Path) -> None:
    async with guarded(tmp_path) as picker:
        no_token = AdminLogin(ca_file=picker.login.ca_file)
        with pytest.raises(KvmeshError, match=r"answered 401: .*--token-file"):
            await ask_picker(picker.url, None, timeout_seconds=5, login=no_token)
        with pytest.raises(KvmeshError, match=r"answered 401: .*--token-file"):
            await ask(picker.url, body=b"{}", path=None, objective=None, timeout_seconds=5, login=no_token)
        with pytest.raises(KvmeshError, match="certificate verify failed"):
            await ask_picker(picker.url, None, timeout_seconds=5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--token-file", "absent"), "the token file absent cannot be read"),
        (("--token-file", "short"), "at least 16 bytes"),
        (("--cert", "short"), "--cert short: no certificate with its key"),
        (("--ca", "short"), "--ca short: no certificates of authorities"),
    ],
)
async def test_files_that_cannot_be_used_are_wrong_usage(
    flags: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "short").write_text("hunter2")
    done = await call(policy_commands, "policy", "explain", *flags)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert "hunter2" not in done.output


@dataclass(kw_only=True)
class Listener:
    """A server that answers everything in one way and remembers what it was shown."""

    status: int = 404
    location: str = ""
    shown: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.shown.append((request.path, request.headers.get("Authorization")))
        headers = {"Location": self.location} if self.location else {}
        return web.json_response({"error": "no"}, status=self.status, headers=headers)


@asynccontextmanager
async def listening(listener: Listener) -> AsyncIterator[Listener]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", listener.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        listener.url = f"http://{HOST}:{runner.addresses[0][1]}"
        yield listener
    finally:
        await runner.cleanup()


async def test_the_doctor_shows_its_token_to_picker_and_indexer_alone(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    grpc_port, admin_port = two_ports()
    async with (
        listening(Listener()) as pod,
        listening(Listener()) as envoy,
        listening(Listener(status=401)) as picker,
        listening(Listener(status=401)) as indexer,
    ):
        settings = picker_settings(
            f"redis://{HOST}:1/0", [pod.url.removeprefix("http://")], grpc_port=grpc_port, admin_port=admin_port
        )
        facts = await gather(
            DoctorSettings(
                picker=settings,
                picker_admin=picker.url,
                indexer_admin=indexer.url,
                envoy_admin=envoy.url,
                login=AdminLogin(token_file=tmp_path / "token"),
                timeout_seconds=5,
            )
        )
    assert {shown for _, shown in [*picker.shown, *indexer.shown]} == {f"Bearer {TOKEN}"}
    assert {shown for _, shown in [*pod.shown, *envoy.shown]} == {None}
    assert facts.picker is not None
    assert facts.indexer is not None
    assert [facts.picker.problem, facts.indexer.problem] == ["it lets us not in (401): no"] * 2


async def test_a_token_does_not_follow_to_another_address(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    login = AdminLogin(token_file=tmp_path / "token")
    async with (
        listening(Listener(status=200)) as elsewhere,
        listening(Listener(status=307, location=f"{elsewhere.url}/v1/explain")) as picker,
    ):
        with pytest.raises(KvmeshError, match="answered 307"):
            await ask(picker.url, body=b"{}", path=None, objective=None, timeout_seconds=5, login=login)
        with pytest.raises(KvmeshError, match="answered 307"):
            await ask_picker(picker.url, None, timeout_seconds=5, login=login)
    assert (len(picker.shown), elsewhere.shown) == (2, [])

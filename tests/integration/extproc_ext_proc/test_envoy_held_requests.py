"""The files of `envoy/` in a real Envoy before our gRPC server: requests that are held back, and claims of a JWT."""

import asyncio
import base64
import hashlib
import hmac
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.admission.classify import claims_named, classify
from extproc.answers.response_plan import PASS_PLAN, ResponsePlan
from extproc.ext_proc.answers import JWT_NAMESPACE
from extproc.ext_proc.exchange import RequestFacts
from extproc.ext_proc.grpc_server import ExtProcServer
from extproc.policy.priority import ClassRule
from extproc.policy.request_class import PriorityPolicy
from operate.local.envoy_config import SocketAddress, fill_in, named, read_template
from operate.local.ports import pick_free_port
from operate.local.processes import HttpReady, ProcessSpec, Supervisor, find_envoy

HOST = "127.0.0.1"
DEADLINE_SECONDS = 30.0
DUPLEX, BUFFERED, ORIGINAL_DST = "local.yaml", "buffered.yaml", "original-dst.yaml"
SHORT_TIMEOUT, HELD_SECONDS = "0.2s", 1.0
POLICY = PriorityPolicy(
    rules=(
        ClassRule(priority_class="critical", claims={"org.plan": "gold"}),
        ClassRule(priority_class="sheddable", claims={"groups": "free"}),
    ),
    tenant_claim="sub",
)


@dataclass(kw_only=True)
class PickedPod:
    endpoints: tuple[str, ...]
    body: bytes | None = None
    removed_headers: tuple[str, ...] = ()
    set_headers: dict[str, str] = field(default_factory=dict)
    response_headers: dict[str, str] = field(default_factory=dict)
    plan: ResponsePlan = PASS_PLAN

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str) -> None: ...

    def response_missed(self, why: str) -> None: ...

    def finish(self) -> None: ...


@dataclass(kw_only=True)
class SlowPicker:
    """Picks the one pod, after a while, as if the request had waited in a queue."""

    hold_seconds: float = 0.0
    pod: str = ""
    facts: list[RequestFacts] = field(default_factory=list)
    left: int = 0  # picks whose client did not wait

    async def pick(self, facts: RequestFacts, body: bytes | None) -> PickedPod:
        self.facts.append(facts)
        try:
            await asyncio.sleep(self.hold_seconds)
        except asyncio.CancelledError:
            self.left += 1
            raise
        return PickedPod(endpoints=(self.pod,))

    def response(self, plan: ResponsePlan) -> Any:
        raise AssertionError("no response was asked for")


@dataclass(kw_only=True)
class Mesh:
    picker: SlowPicker
    gateway: str
    http: aiohttp.ClientSession

    async def post(self, **headers: str) -> int:
        sent = {"content-type": "application/json"} | headers
        url = f"{self.gateway}/v1/chat/completions"
        async with self.http.post(url, data=b'{"model":"m"}', headers=sent) as response:
            await response.read()
            return response.status


Edit = Callable[[list[dict[str, Any]]], None]
PROTOCOL_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


@asynccontextmanager
async def mesh(
    file: str, tmp_path: Path, picker: SlowPicker, *, edit: Edit, silent: bool = False
) -> AsyncIterator[Mesh]:
    """A real Envoy with that file, whose HTTP filters `edit` may change, our gRPC server and a pod.

    With `silent` nobody answers at the picker's address, as if its machine were gone, and Envoy asks sooner.
    """
    server = ExtProcServer(picks=picker, max_body_bytes=1 << 20, claims=claims_named(POLICY))
    ports = [await server.start(host=HOST, port=0)]
    for _ in range(2):
        ports.append(pick_free_port(host=HOST, avoid=ports))
    picker_address, gateway, admin = (SocketAddress(host=HOST, port=port) for port in ports)
    nobody = await asyncio.start_server(lambda reader, writer: None, HOST, 0)
    if silent:
        picker_address = SocketAddress(host=HOST, port=nobody.sockets[0].getsockname()[1])
    pod = await start_pod()
    pod_address = SocketAddress(host=HOST, port=pod.addresses[0][1])
    picker.pod = str(pod_address)
    template = read_template(file)
    pods = named(template["static_resources"]["clusters"], "pods")
    listed = "load_assignment" in pods
    pods.setdefault("load_assignment", {})
    config = fill_in(template, gateway=gateway, admin=admin, picker=picker_address, pods=[pod_address])
    if not listed:
        named(config["static_resources"]["clusters"], "pods").pop("load_assignment")
    edit(config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"])
    if silent:
        options = named(config["static_resources"]["clusters"], "picker")["typed_extension_protocol_options"]
        keepalive = options[PROTOCOL_OPTIONS]["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
        keepalive.update(interval="0.2s", timeout="0.2s")
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(config))
    try:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
        async with running_envoy(path, admin), aiohttp.ClientSession(timeout=timeout) as http:
            yield Mesh(picker=picker, gateway=f"http://{gateway}", http=http)
    finally:
        nobody.close()
        await server.stop(grace_seconds=0)
        await pod.cleanup()


@asynccontextmanager
async def running_envoy(config: Path, admin: SocketAddress) -> AsyncIterator[None]:
    envoy = ProcessSpec(
        name="envoy",
        argv=(str(find_envoy()), "-c", str(config), "--disable-hot-restart", "--concurrency", "1"),
        ready=(HttpReady(url=f"http://{admin}/ready"),),
    )
    ready = asyncio.Event()

    async def when_ready() -> None:
        ready.set()
        await asyncio.Event().wait()

    supervisor = Supervisor(log_directory=config.parent)
    run = asyncio.create_task(supervisor.run([[envoy]], environment=os.environ, when_ready=when_ready))
    began = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({run, began}, timeout=DEADLINE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
        yield
    finally:
        began.cancel()
        run.cancel()
        with suppress(asyncio.CancelledError):
            await run


async def start_pod() -> web.AppRunner:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    return runner


def unchanged(filters: list[dict[str, Any]]) -> None:
    """Leave the file as it is."""


def short_timeout(filters: list[dict[str, Any]]) -> None:
    named(filters, "envoy.filters.http.ext_proc.kvmesh")["typed_config"]["message_timeout"] = SHORT_TIMEOUT


async def test_with_duplex_bodies_no_timeout_ends_a_request_that_waits_in_the_picker(tmp_path: Path) -> None:
    async with mesh(DUPLEX, tmp_path, SlowPicker(hold_seconds=HELD_SECONDS), edit=short_timeout) as running:
        assert await running.post() == 200


@pytest.mark.parametrize("file", [BUFFERED, ORIGINAL_DST])
async def test_with_buffered_bodies_the_message_timeout_bounds_the_wait_which_is_why_it_is_so_long(
    tmp_path: Path, file: str
) -> None:
    async with mesh(file, tmp_path, SlowPicker(hold_seconds=HELD_SECONDS), edit=short_timeout) as running:
        assert await running.post() == 503  # nobody has picked for it
        assert running.picker.left == 1
    async with mesh(file, tmp_path, SlowPicker(hold_seconds=HELD_SECONDS), edit=unchanged) as running:
        assert await running.post() == 200


@pytest.mark.parametrize("file", [DUPLEX, BUFFERED])
async def test_a_client_that_leaves_ends_its_wait_in_the_picker(tmp_path: Path, file: str) -> None:
    async with mesh(file, tmp_path, SlowPicker(hold_seconds=DEADLINE_SECONDS), edit=unchanged) as running:
        request = asyncio.create_task(running.post())
        await until(lambda: len(running.picker.facts) == 1)
        request.cancel()
        await until(lambda: running.picker.left == 1)


@pytest.mark.parametrize("file", [DUPLEX, BUFFERED, ORIGINAL_DST])
async def test_requests_that_wait_at_a_picker_whose_machine_is_gone_are_answered_503(tmp_path: Path, file: str) -> None:
    async with mesh(file, tmp_path, SlowPicker(), edit=unchanged, silent=True) as running:
        assert await running.post() == 503


SECRET = b"a secret of 32 bytes for testing"


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def token(claims: dict[str, Any], *, secret: bytes = SECRET) -> str:
    signed = f"{encoded(json.dumps({'alg': 'HS256', 'kid': 'k'}).encode())}.{encoded(json.dumps(claims).encode())}"
    return f"{signed}.{encoded(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


def jwt_authn(filters: list[dict[str, Any]]) -> None:
    """Put Envoy's JWT filter first; a request without token may pass, one with a bad token may not."""
    keys = {"keys": [{"kty": "oct", "alg": "HS256", "kid": "k", "k": encoded(SECRET)}]}
    api = "type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication"
    provider = {
        "issuer": "test",
        "local_jwks": {"inline_string": json.dumps(keys)},
        "payload_in_metadata": "payload",
    }
    either = {"requires_any": {"requirements": [{"provider_name": "test"}, {"allow_missing": {}}]}}
    rules = [{"match": {"prefix": "/"}, "requires": either}]
    config = {"@type": api, "providers": {"test": provider}, "rules": rules}
    filters.insert(0, {"name": JWT_NAMESPACE, "typed_config": config})


@pytest.mark.parametrize("file", [DUPLEX, BUFFERED, ORIGINAL_DST])
async def test_the_claims_that_envoy_has_verified_set_class_and_tenant(tmp_path: Path, file: str) -> None:
    picker = SlowPicker()
    gold = {"iss": "test", "sub": "acme", "org": {"plan": "gold"}, "groups": ["free", "beta"], "email": "a@b.c"}
    async with mesh(file, tmp_path, picker, edit=jwt_authn) as running:
        assert await running.post(authorization=f"Bearer {token(gold)}") == 200
        assert await running.post(authorization=f"Bearer {token({'iss': 'test', 'groups': ['free']})}") == 200
        assert await running.post() == 200
        assert await running.post(authorization=f"Bearer {token(gold, secret=b'x' * 32)}") == 401
    assert [facts.claims for facts in picker.facts] == [
        {"sub": "acme", "org.plan": "gold", "groups": "free\nbeta"},
        {"groups": "free"},
        {},
    ]
    found = [classify(facts, model="m", policy=POLICY) for facts in picker.facts]
    assert [(request_class.class_name, request_class.tenant) for request_class in found] == [
        ("critical", "acme"),
        ("sheddable", ""),
        ("standard", ""),
    ]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)

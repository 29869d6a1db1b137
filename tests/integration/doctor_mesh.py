"""A small real mesh for the doctor: simulated pods, some behind a proxy that tampers, indexer, picker, Envoy."""

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from extproc.models.models import ModelTable
from extproc.pages.findings import Finding, Severity
from extproc.policy.values import Steering
from extproc.service import serve
from extproc.settings.config import PickerSettings
from kv_indexer.config import IndexerSettings
from kv_indexer.service import IndexerService
from kvmesh.blocks.source import SourceState
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.pods.pod_access import PodAccess
from operate.doctor.examine import DoctorSettings, examine
from operate.local.envoy_config import SocketAddress, named
from operate.local.ports import pick_free_port
from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import running_pods
from tests.integration.envoy_process import HOST, free_addresses, running_envoy

FOLLOWED = (SourceState.LIVE, SourceState.DEGRADED)
SEED = "the-seed"
DEADLINE_SECONDS = 30.0
Page = Callable[[bytes], bytes]  # what a tampering proxy makes of a pod's page


@dataclass(frozen=True, kw_only=True)
class Tampered:
    """What is different at one pod: pages by path, and headers of all answers."""

    pages: Mapping[str, Page | int] = field(default_factory=dict)  # a number: that status instead
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = "tiny"
    folder: Path = TINY_MODEL
    scale_out: bool = True
    block_size: int = 16


HEALTHY = Tampered()


def replaced(old: str, new: str) -> Page:
    """A page in which something is replaced; it must have been there."""

    def page(body: bytes) -> bytes:
        assert old.encode() in body, f"{old} is not in {body[:500]!r}"
        return body.replace(old.encode(), new.encode())

    return page


def changed_json(change: Callable[[Any], Any]) -> Page:
    return lambda body: json.dumps(change(json.loads(body))).encode()


@asynccontextmanager
async def pods(*tampered: Tampered) -> AsyncIterator[list[str]]:
    """Simulated pods, each behind a proxy where something is tampered with; gives their addresses."""
    async with AsyncExitStack() as stack:
        addresses = []
        for each in tampered:
            engine = EngineSettings(
                block_size=each.block_size,
                total_blocks=1024,
                max_running=8,
                prefill_tokens_per_second=1e6,
                inter_token_seconds=0.001,
            )
            settings = PodSettings(model=each.model, max_model_len=4096, scale_out=each.scale_out, engine=engine)
            publisher = PublisherSettings(host=HOST)
            [pod] = await stack.enter_async_context(
                running_pods(settings, folder=load_model_folder(each.folder), publisher=publisher)
            )
            address = f"{HOST}:{pod.port}"
            if each.pages or each.headers:
                address = await stack.enter_async_context(_proxy(address, each))
            addresses.append(address)
        yield addresses


@asynccontextmanager
async def _proxy(target: str, tampered: Tampered) -> AsyncIterator[str]:
    async with aiohttp.ClientSession() as http:

        async def handle(request: web.Request) -> web.StreamResponse:
            body, kind = await request.read(), request.headers.get("content-type", "application/json")
            page = tampered.pages.get(request.path)
            if isinstance(page, int):
                return web.Response(status=page, headers=dict(tampered.headers))
            async with http.request(
                request.method, f"http://{target}{request.path_qs}", data=body, headers={"content-type": kind}
            ) as answer:
                content = await answer.read()
                return web.Response(
                    status=answer.status,
                    body=page(content) if page is not None else content,
                    headers={"content-type": answer.headers.get("content-type", kind), **tampered.headers},
                )

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, 0).start()
            yield f"{HOST}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def indexer(
    redis_url: str,
    endpoints: Sequence[str],
    *,
    model: str = "tiny",
    hash_seed: str = SEED,
    live: bool = True,
    pod_access: PodAccess | None = None,
) -> AsyncIterator[str]:
    """A real indexer; gives its admin address once it follows every endpoint."""
    port = pick_free_port(host=HOST, avoid=())
    settings = IndexerSettings(
        host=HOST,
        admin_port=port,
        redis_url=redis_url,
        endpoints=tuple(endpoints),
        model=model,
        hash_seed=hash_seed,
        pod_access=pod_access or PodAccess(),
    )
    task = asyncio.create_task(IndexerService(settings).run(), name="indexer")
    try:
        if live:
            await _until_live(redis_url, endpoints, task)
        yield f"http://{HOST}:{port}"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(DEADLINE_SECONDS):
                await task


async def _until_live(redis_url: str, endpoints: Sequence[str], task: asyncio.Task[None]) -> None:
    reader = PrefixIndexReader(url=redis_url, hash_seed=SEED)
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while True:
            sources = (await reader.status()).sources
            live = {source.endpoint for source in sources if source.state in FOLLOWED}
            if live >= set(endpoints):
                return
            assert not task.done(), task
            assert time.monotonic() < deadline, f"not all followed: {sources}"
            await asyncio.sleep(0.02)
    finally:
        await reader.close()


def picker_settings(
    redis_url: str,
    endpoints: Sequence[str],
    *,
    hash_seed: str = SEED,
    model: str | None = "tiny",
    tokenizer: Path | None = TINY_MODEL,
    models: ModelTable | None = None,
    steering: Steering = Steering.OVERRIDE_HOST,
    grpc_port: int = 1,
    admin_port: int = 0,
) -> PickerSettings:
    return PickerSettings(
        host=HOST,
        grpc_port=grpc_port,
        admin_port=admin_port,
        redis_url=redis_url,
        endpoints=tuple(endpoints),
        model=model,
        tokenizer_folder=tokenizer,
        hash_seed=hash_seed,
        steering=steering,
        # the machine of the tests may be busy: its round trips are not what is tested
        index_timeout_seconds=5.0,
        scrape_interval_seconds=0.2,
        scrape_timeout_seconds=5.0,
        max_body_bytes=16 << 20,
        drain_seconds=0.0,
        otlp_endpoint=None,
        models=models or ModelTable(),
        shares_load=False,
    )


@asynccontextmanager
async def picker(settings: PickerSettings) -> AsyncIterator[str]:
    """A real picker; gives its admin address once it is ready."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, stop=stop), name="picker")
    url = f"http://{HOST}:{settings.admin_port}"
    try:
        async with aiohttp.ClientSession() as http:
            await _until_ok(http, f"{url}/readyz", task)
        yield url
    finally:
        stop.set()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await task


async def _until_ok(http: aiohttp.ClientSession, url: str, task: asyncio.Task[None]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        with suppress(aiohttp.ClientError):
            async with http.get(url) as answer:
                if answer.status == 200:
                    return
        assert not task.done(), task
        assert time.monotonic() < deadline, f"{url} does not answer 200"
        await asyncio.sleep(0.02)


def two_ports() -> tuple[int, int]:
    first, second = free_addresses(2)
    return first.port, second.port


@asynccontextmanager
async def envoy(
    tmp_path: Path,
    *,
    picker_port: int,
    endpoints: Sequence[str],
    file: str = "local.yaml",
    change: Callable[[dict[str, Any]], None] = lambda _: None,
) -> AsyncIterator[str]:
    """A real Envoy with one of our files, changed; gives its admin address once it is ready."""
    pods = [SocketAddress.parse(endpoint) for endpoint in endpoints]
    async with running_envoy(tmp_path, file=file, picker_port=picker_port, pods=pods, change=change) as process:
        yield process.admin


def parts(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The connection manager, the picking filter, the picker's cluster and the pods' cluster of an Envoy file."""
    resources = config["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    clusters = resources["clusters"]
    picking = named(manager["http_filters"], "envoy.filters.http.ext_proc.kvmesh")["typed_config"]
    return manager, picking, named(clusters, "picker"), named(clusters, "pods")


def folder_with(tmp_path: Path, name: str, page: Page) -> Path:
    """A copy of the tiny model with one file changed."""
    folder = tmp_path / "model"
    shutil.copytree(TINY_MODEL, folder)
    (folder / name).write_bytes(page((folder / name).read_bytes()))
    return folder


async def findings(settings: PickerSettings, **more: Any) -> list[Finding]:
    """What the doctor finds wrong."""
    fast = {"timeout_seconds": 10.0, "visible_within_seconds": 10.0} | more
    found = await examine(DoctorSettings(picker=settings, **fast))
    return [finding for finding in found if finding.severity is not Severity.OK]


def only(found: Sequence[Finding], check: str) -> Finding:
    """The one finding, which must be of this check."""
    assert [finding.check for finding in found] == [check], found
    return found[0]

"""Runs pods in one process; each has an engine, a publisher, a replay task and an HTTP site.

The command `sim` and the tests use `running_pods`; leaving it stops everything and frees the ports.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import uvloop
import zmq.asyncio
from aiohttp import web

from podsim.api import PodApi
from podsim.errors import PortInUseError
from podsim.model_folder import ModelFolder
from podsim.pod import Pod, PodSettings
from podsim.publisher import EventPublisher, PublisherSettings

log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 0.01  # then answers in progress are cut off; 0 would wait for them
_LARGEST_BODY_BYTES = 64 * 1024 * 1024
_WILDCARDS = frozenset({"", "0.0.0.0", "::"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPod:
    """A pod that is running, and its addresses."""

    pod: Pod
    host: str  # as other machines reach it
    port: int

    @property
    def base_url(self) -> str:
        """The URL of its HTTP API, without a final slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def events_endpoint(self) -> str:
        """The ZMQ address of the live events."""
        return self.pod.publisher.events_endpoint

    @property
    def replay_endpoint(self) -> str:
        """The ZMQ address of the replay ROUTER."""
        return self.pod.publisher.replay_endpoint


def serve_until_stopped(
    settings: PodSettings, folder: ModelFolder, publisher: PublisherSettings, *, port: int, count: int
) -> None:
    """Run `count` pods until SIGTERM or SIGINT."""

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with running_pods(settings, folder=folder, publisher=publisher, port=port, count=count):
            await stop.wait()

    uvloop.run(serve())


@asynccontextmanager
async def running_pods(
    settings: PodSettings | Sequence[PodSettings],
    *,
    folder: ModelFolder,
    publisher: PublisherSettings,
    port: int = 0,
    count: int = 1,
) -> AsyncIterator[Sequence[RunningPod]]:
    """Run pods on `publisher.host`: `count` equal ones, or one for each of several settings.

    Pod i listens on port + i and publishes on events port + 2i (replay: + 2i + 1); a 0 lets the OS choose. Raises
    PortInUseError, with nothing left running.
    """
    async with AsyncExitStack() as stack:
        context = zmq.asyncio.Context()
        stack.callback(context.term)
        pods: list[RunningPod] = []
        each = [settings] * count if isinstance(settings, PodSettings) else settings
        for index, one in enumerate(each):
            own = replace(publisher, port=publisher.port + 2 * index if publisher.port else 0)
            pods.append(
                await _start_pod(
                    stack,
                    one,
                    folder=folder,
                    events=EventPublisher(context, own, advertised_host=_advertised(publisher.host)),
                    host=publisher.host,
                    port=port + index if port else 0,
                )
            )
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(coroutine, name=f"podsim-{name}-{served.port}")
                for served in pods
                for name, coroutine in _endless_work(served.pod)
            ]
            try:
                yield pods
            finally:
                for task in running:
                    task.cancel()


def _endless_work(pod: Pod) -> Iterator[tuple[str, Coroutine[None, None, None]]]:
    yield "engine", pod.run()
    yield "replay", pod.publisher.serve_replay()
    if pod.kv_transfer is not None:
        yield "kv-transfer", pod.kv_transfer.run()


async def _start_pod(
    stack: AsyncExitStack,
    settings: PodSettings,
    *,
    folder: ModelFolder,
    events: EventPublisher,
    host: str,
    port: int,
) -> RunningPod:
    stack.callback(events.close)
    pod = Pod(settings, folder=folder, publisher=events)
    if pod.kv_transfer is not None:
        stack.callback(pod.kv_transfer.close)
        await pod.kv_transfer.listen(host, advertised_host=_advertised(host))
    server = web.Server(
        PodApi(pod).handle,
        request_factory=_make_request,
        handler_cancellation=True,  # stop the handler when its client disconnects
        auto_decompress=False,  # like vLLM, read the body as sent and ignore content-encoding
        access_log=None,
    )
    runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_SECONDS)
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        raise PortInUseError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error
    bound_port: int = runner.addresses[0][1]
    log.info(
        "pod %s:%d serves %s; events %s, replay %s",
        host,
        bound_port,
        settings.model,
        events.events_endpoint,
        events.replay_endpoint,
    )
    return RunningPod(pod=pod, host=_advertised(host), port=bound_port)


def _make_request(
    message: Any, payload: Any, protocol: Any, payload_writer: Any, task: asyncio.Task[None]
) -> web.BaseRequest:
    """Return a request that accepts a large body."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, payload_writer, task, loop, client_max_size=_LARGEST_BODY_BYTES)


def _advertised(host: str) -> str:
    """Return the address to give to others; for a wildcard, the one this machine uses for outgoing connections."""
    if host not in _WILDCARDS:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # connecting a datagram socket sends nothing
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address

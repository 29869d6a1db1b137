"""A pod that announces what is not its own: another pod's stream and replay, a socket file, another host.

It breaks off if anyone connects to the file or the host, which shows in its test.
"""

import asyncio
import itertools
import tempfile
from pathlib import Path

import aiohttp
from aiohttp import web

from tests.attack.hostile_pages import hostile_pages
from tests.attack.target import Target
from tests.e2e.stack import free_ports

OTHER_HOST = "127.0.0.2"


async def attack(target: Target) -> None:
    """Announce one after the other."""
    target.begin()
    async with aiohttp.ClientSession() as http, http.get(f"http://{target.pods[0]}/kv_event_sources") as answer:
        stream = (await answer.json())["0"]
    connected = asyncio.Event()

    def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.close()

    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events"
        async with await asyncio.start_unix_server(note, file), await asyncio.start_server(note, OTHER_HOST, port):
            announced = itertools.cycle(
                {"0": {**stream, **changes}}
                for changes in (
                    {},
                    {"endpoint": f"tcp://*:{port}"},
                    {"endpoint": f"ipc://{file}", "replay_endpoint": None},
                    {"endpoint": f"tcp://{OTHER_HOST}:{port}", "replay_endpoint": None},
                    {"endpoint": f"tcp://{OTHER_HOST};127.0.0.1:{port}", "replay_endpoint": None},
                )
            )

            def pages(path: str) -> web.Response | None:
                return web.json_response(next(announced)) if path == "/kv_event_sources" else None

            async with hostile_pages(target, pages):
                await connected.wait()
                raise RuntimeError("the indexer has connected to an address that is not the pod's")

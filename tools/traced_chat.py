"""Follows one chat through the picker: the calls that it takes, the files that they are in, how deep they nest.

A picker with a Redis of its own gets Envoy's messages for two chats, one after the other; the second one is followed,
from its first message to the end of what is done behind the answer. `tools.structure` prints what is counted.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from extproc.ext_proc.exchange import BodyMode
from extproc.service import PickerService
from extproc.settings.config import PickerSettings
from podsim.model_folder import TINY_MODEL
from tests.integration.kv_redis import RedisServer

REPOSITORY = Path(__file__).parents[1]
PACKAGES = tuple(f"{REPOSITORY}/{name}/" for name in ("extproc", "kvmesh"))
PODS = ("127.0.0.1:9", "127.0.0.2:9")
CHAT = b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"What is a prefix cache? " * 40 + b'"}]}'
# whose visits are counted: calls into the file from another one
VISITED = ("extproc/pick.py", "extproc/admission/admit_request.py")


@dataclass
class Trace:
    """What was called, in the order of the calls."""

    files: list[str] = field(default_factory=list)  # of each call
    callers: list[str] = field(default_factory=list)  # the file of ours that called it, "" for none
    functions: set[tuple[str, str]] = field(default_factory=set)
    depth: int = 0

    def counts(self) -> dict[str, int]:
        """Return the numbers of calls, functions, files, changes of file and visits, and the depth."""
        visits = Counter(
            name for name, caller in zip(self.files, self.callers, strict=True) if name in VISITED and caller != name
        )
        return {
            "one chat: calls": len(self.files),
            "one chat: functions": len(self.functions),
            "one chat: files": len(set(self.files)),
            "one chat: depth": self.depth,
            "one chat: visits of pick and admission": sum(visits.values()),
        }


class _Follower:
    """A profile function that notes calls of our packages; a coroutine that goes on is no new call."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._frames: set[FrameType] = set()  # that were called; kept, so that none is taken for another

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; see `sys.setprofile`."""
        if event != "call" or frame in self._frames or not frame.f_code.co_filename.startswith(PACKAGES):
            return
        self._frames.add(frame)
        ours = _stack(frame)
        self.trace.files.append(ours[0])
        self.trace.callers.append(ours[1] if len(ours) > 1 else "")
        self.trace.functions.add((ours[0], frame.f_code.co_qualname))
        self.trace.depth = max(self.trace.depth, len(ours))


def _stack(frame: FrameType | None) -> list[str]:
    """Return the files of our frames on the stack, the innermost first."""
    files = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGES):
            files.append(name.removeprefix(f"{REPOSITORY}/"))
        frame = frame.f_back
    return files


class _Stream:
    """In the place of the HTTP/2 stream."""

    pool = ""

    def send(self, *_: bytes) -> None:
        """Drop the answer."""

    hold = release = flush = finish = lambda *_: None


def _messages() -> list[bytes]:
    headers, body = ProcessingRequest(), ProcessingRequest()
    for name, value in ((":method", "POST"), (":path", "/v1/chat/completions"), ("content-type", "application/json")):
        headers.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    headers.protocol_config.request_body_mode = BodyMode.BUFFERED
    body.request_body.body = CHAT
    body.request_body.end_of_stream = True
    return [headers.SerializeToString(), body.SerializeToString()]


async def _chat(service: PickerService) -> None:
    assert service.server is not None, "started"
    calls = service.server.calls
    call = calls.serve(_Stream())  # type: ignore[arg-type]
    for message in _messages():
        call.message(message)
    await asyncio.gather(*calls.tasks)
    await asyncio.sleep(0)  # what is done behind the answer
    call.ended()


async def _followed(redis_url: str) -> Trace:
    settings = PickerSettings(
        endpoints=PODS, redis_url=redis_url, grpc_port=0, admin_port=0, model="tiny", tokenizer_folder=TINY_MODEL
    )
    service = PickerService(settings)
    await service.start()
    follower = _Follower()
    try:
        await _chat(service)
        sys.setprofile(follower)
        try:
            await _chat(service)
        finally:
            sys.setprofile(None)
    finally:
        await service.close()
    return follower.trace


def traced_chat() -> Trace:
    """Return the calls of one chat."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            return asyncio.run(_followed(server.url))
        finally:
            server.kill()

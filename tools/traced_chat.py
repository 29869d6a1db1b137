"""Follows one chat through the picker: the calls that it takes, the files that they are in, how deep they nest.

A picker with its own Redis gets Envoy's messages for some chats, one after the other. All but the first are followed,
from the first message to the end of the work behind the answer, and the one with the fewest calls counts: the picker's
regular work falls into the others. `tools.structure` prints the counts.
"""

import asyncio
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from extproc.ext_proc.exchange import BodyMode
from extproc.http2.grpc_messages import GrpcStatus
from extproc.service import PickerService
from extproc.settings.config import PickerSettings
from podsim.model_folder import TINY_MODEL
from tests.integration.kv_redis import RedisServer

REPOSITORY = Path(__file__).parents[1]
PACKAGES = tuple(f"{REPOSITORY}/{name}/" for name in ("extproc", "kvmesh"))
PODS = ("127.0.0.1:9", "127.0.0.2:9")
CHAT = b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"What is a prefix cache? " * 40 + b'"}]}'
FOLLOWED_CHATS = 4


@dataclass
class Trace:
    """What was called, in the order of the calls."""

    files: list[str] = field(default_factory=list)  # of each call
    functions: set[tuple[str, str]] = field(default_factory=set)
    depth: int = 0

    def counts(self) -> dict[str, int]:
        """Return the sizes of the path.

        A change of file is a call in another file than the call before it, in the order in which a reader follows them.
        A return to the caller's file counts with the next call there.
        """
        rooms = {tuple(Path(name).parts[:2]) for name in self.files}  # a file that is in no room is one
        return {
            "one chat: files": len(set(self.files)),
            "one chat: changes of file": sum(before != after for before, after in pairwise(self.files)),
            "one chat: rooms": len(rooms),
            "one chat: calls": len(self.files),
            "one chat: functions": len(self.functions),
            "one chat: depth": self.depth,
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

    pool = authority = ""

    def __init__(self) -> None:
        self.answers: list[bytes] = []

    def send(self, *parts: bytes) -> None:
        """Keep the answer."""
        self.answers.append(b"".join(parts))

    def finish(self, status: GrpcStatus = GrpcStatus.OK, text: str = "") -> None:
        """Fail where the picker cannot serve these messages any more: the path would be that of an error."""
        raise AssertionError(f"the stream was ended: {status.name} {text}")

    hold = release = flush = lambda _: None


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
    calls, stream = service.server.calls, _Stream()
    call = calls.serve(stream)  # type: ignore[arg-type]
    for message in _messages():
        call.message(message)
    await asyncio.gather(*calls.tasks)
    await asyncio.sleep(0)  # what is done behind the answer
    call.ended()
    assert any(pod.encode() in stream.answers[-1] for pod in PODS), "no pod was picked"


async def _followed(service: PickerService) -> Trace:
    follower = _Follower()
    sys.setprofile(follower)
    try:
        await _chat(service)
    finally:
        sys.setprofile(None)
    return follower.trace


async def _shortest(redis_url: str) -> Trace:
    settings = PickerSettings(
        endpoints=PODS, redis_url=redis_url, grpc_port=0, admin_port=0, model="tiny", tokenizer_folder=TINY_MODEL
    )
    service = PickerService(settings)
    await service.start()
    try:
        await _chat(service)  # the first one fills caches
        traces = [await _followed(service) for _ in range(FOLLOWED_CHATS)]
    finally:
        await service.close()
    return min(traces, key=lambda trace: len(trace.files))


def traced_chat() -> Trace:
    """Return the calls of one chat."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            return asyncio.run(_shortest(server.url))
        finally:
            server.kill()

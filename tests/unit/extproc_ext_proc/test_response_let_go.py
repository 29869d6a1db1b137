"""A picker that stops lets go of responses half-way: they are not over, and nothing is concluded from what it saw."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from extproc.answers.response_plan import ResponseHandling, ResponsePlan
from extproc.ext_proc.answers import ResponseHead
from extproc.ext_proc.call import ExtProcCall, ExtProcCalls
from extproc.ext_proc.exchange import BodyMode, RequestFacts
from extproc.shared.quota import QuotaNote

COUNTED = ResponsePlan(quota=QuotaNote("acme", "tiny", 100))


@dataclass
class FakeResponse:
    finishes: int = 0
    holds_back: bool = False

    def begin(self, head: ResponseHead, *, served_by: str | None) -> ResponseHandling:
        return ResponseHandling.READ

    def chunk(self, content: bytes, *, end_of_stream: bool) -> bytes:
        return content

    def finish(self) -> None:
        self.finishes += 1


@dataclass
class FakeExchange:
    endpoints: Sequence[str] = ("10.0.0.1:8000",)
    finishes: int = 0
    body: bytes | None = None
    removed_headers: tuple[str, ...] = ()
    set_headers: Mapping[str, str] = field(default_factory=dict)
    plan: ResponsePlan = COUNTED
    response_headers: Mapping[str, str] = field(default_factory=dict)

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str) -> None:
        pass

    def response_missed(self, why: str) -> None:
        pass

    def finish(self) -> None:
        self.finishes += 1


@dataclass
class FakePicks:
    exchange: FakeExchange = field(default_factory=FakeExchange)
    opened: FakeResponse = field(default_factory=FakeResponse)

    async def pick(self, facts: RequestFacts, body: bytes | None) -> FakeExchange:
        return self.exchange

    def response(self, plan: ResponsePlan) -> FakeResponse:
        return self.opened


class FakeStream:
    """In the place of a `GrpcStream`: its end is told to the call once."""

    pool = authority = ""

    def __init__(self) -> None:
        self.call: ExtProcCall | None = None

    def send(self, message: Any) -> None: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def flush(self) -> None: ...

    def finish(self, *_: Any) -> None:
        if self.call is not None:
            call, self.call = self.call, None
            call.ended()


def request_headers() -> bytes:
    message = ProcessingRequest()
    for name, value in ((":method", b"POST"), (":path", b"/v1/completions")):
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    message.protocol_config.request_body_mode = BodyMode.NONE
    encoded: bytes = message.SerializeToString()
    return encoded


def response_headers() -> bytes:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    encoded: bytes = message.SerializeToString()
    return encoded


def response_body(*, end_of_stream: bool) -> bytes:
    message = ProcessingRequest()
    message.response_body.body = b"data: 1"
    message.response_body.end_of_stream = end_of_stream
    encoded: bytes = message.SerializeToString()
    return encoded


@pytest.mark.parametrize(
    ("stops", "ended", "concluded"),
    [(True, False, 0), (True, True, 1), (False, False, 1), (False, True, 1)],
    ids=["let go of", "read to its end by a picker that stops", "its client left", "read to its end"],
)
async def test_only_a_response_that_is_over_is_concluded(stops: bool, ended: bool, concluded: int) -> None:
    picks, stream = FakePicks(), FakeStream()
    calls = ExtProcCalls(picks=picks, max_body_bytes=1000)
    stream.call = call = calls.serve(stream)  # type: ignore[arg-type]
    call.message(request_headers())
    await asyncio.gather(*calls.tasks)
    call.message(response_headers())
    call.message(response_body(end_of_stream=ended))
    if stops:
        calls.release_answered()
    stream.finish()

    assert (picks.opened.finishes, picks.exchange.finishes) == (concluded, 1)

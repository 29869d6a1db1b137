"""Envoy's side of ext_proc for the hermetic cases: sends one HTTP exchange's messages and does what it is answered.

In each of two body modes, as `envoy/local.yaml` and `envoy/buffered.yaml` set them up, and in each of the two encodings
of header values: Envoy fills `raw_value`, other data planes `value`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from extproc.ext_proc.answers import JWT_NAMESPACE
from extproc.ext_proc.exchange import BodyMode

DEADLINE_SECONDS = 10.0
CALL_SECONDS = 120.0
DESTINATION = "x-gateway-destination-endpoint"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """What leaves for a pod."""

    endpoints: tuple[str, ...]  # the winner, then the fallbacks
    body: bytes
    set_headers: Mapping[str, str] = field(default_factory=dict)  # besides the destination
    removed_headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What the client is told in a pod's place."""

    status: int
    reason: str  # x-kvmesh-reason
    content_type: str
    error: Mapping[str, Any]
    retry_after: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # further ones
    request_id: str | None = field(default=None, compare=False)  # each one's own
    decision_id: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What leaves for the client of a pod's response."""

    asked_for: bool  # the picker had the body
    removed_headers: tuple[str, ...]
    chunks: tuple[bytes, ...]  # one for each that the pod sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Envoy:
    """One way of speaking to the picker."""

    mode: BodyMode
    raw: bool  # header values as bytes

    @asynccontextmanager
    async def exchange(self, grpc_address: str) -> AsyncIterator["HttpExchange"]:
        """Open one HTTP exchange; its end is the end of its ext_proc streams."""
        async with grpc.aio.insecure_channel(grpc_address) as channel:
            method = channel.stream_stream(
                PROCESS,
                request_serializer=ProcessingRequest.SerializeToString,
                response_deserializer=ProcessingResponse.FromString,
            )
            # gRPC's own limit besides: what waits at the end of a channel, too, is over then
            exchange = HttpExchange(self, partial(method, timeout=CALL_SECONDS))
            yield exchange
            await exchange.close()

    def put(self, headers: Any, values: Mapping[str, str]) -> None:
        """Fill a HttpHeaders message."""
        for name, value in values.items():
            if self.raw:
                headers.headers.headers.add(key=name, raw_value=value.encode())
            else:
                headers.headers.headers.add(key=name, value=value)


class HttpExchange:
    """One request and its response."""

    def __init__(self, envoy: Envoy, method: Any) -> None:
        self._envoy = envoy
        self._method = method
        self._stream = _Stream(method())
        self._streams = [self._stream]
        self._metadata: dict[str, Any] = {}  # dynamic, as the picker has set it

    async def request(
        self,
        *chunks: bytes,
        method: str = "POST",
        path: str = "/v1/completions",
        headers: Mapping[str, str] | None = None,
        subset: Any = None,
        claims: Mapping[str, Any] | None = None,
        cluster: str | None = None,
    ) -> Routed | Refused:
        """Send a request; without chunks it has no body.

        `subset` is the route's candidates and `claims` those of a verified token, both as metadata; `cluster` the one
        that it is dealt to, as an attribute.
        """
        first = ProcessingRequest()
        values = {":method": method, ":path": path, "hi": "mom", "x-request-id": "test-request-id"}
        self._envoy.put(first.request_headers, values | dict(headers or {}))
        first.request_headers.end_of_stream = not chunks
        first.protocol_config.request_body_mode = self._envoy.mode
        if subset is not None:
            first.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET_KEY: subset})
        if claims is not None:
            first.metadata_context.filter_metadata[JWT_NAMESPACE].update({"payload": dict(claims)})
        if cluster is not None:
            first.attributes["envoy.filters.http.ext_proc"].update({"xds.cluster_name": cluster})
        await self._stream.send(first)
        if not chunks:
            return self._outcome(await self._stream.read(), body=b"")
        if self._envoy.mode is BodyMode.BUFFERED:
            return await self._buffered(b"".join(chunks))
        return await self._streamed(chunks)

    async def give_up(self, *chunks: bytes, path: str = "/v1/completions") -> None:
        """Begin a request and leave before its body has ended."""
        first = ProcessingRequest()
        self._envoy.put(first.request_headers, {":method": "POST", ":path": path})
        first.protocol_config.request_body_mode = self._envoy.mode
        await self._stream.send(first)
        for chunk in chunks:
            await self._stream.send(_request_body(chunk, end_of_stream=False))
        self._streams.remove(self._stream)
        self._stream.cancel()

    async def response(self, *chunks: bytes, status: int = 200, content_type: str = "application/json") -> Returned:
        """Let the pod that was picked answer so; the last chunk ends the body."""
        headers = ProcessingRequest()
        self._envoy.put(headers.response_headers, {":status": str(status), "content-type": content_type})
        note = self._metadata.get("kvmesh", {})
        if self._envoy.mode is BodyMode.FULL_DUPLEX_STREAMED:
            returned = await self._through_second_filter(headers, note, chunks)
            headers.metadata_context.filter_metadata["kvmesh"].update(self._metadata.get("kvmesh", {}))
            answer = await self._ask(self._stream, headers)
            assert not answer.HasField("mode_override"), "Envoy ignores it beside duplex request bodies"
            return returned
        return await self._asked_bodies(self._stream, headers, chunks)

    async def close(self) -> None:
        """End the exchange; every stream must end well."""
        for stream in self._streams:
            await stream.close()

    # --- the two modes --------------------------------------------------------------------------------------------

    async def _buffered(self, body: bytes) -> Routed | Refused:
        answer = await self._stream.read()
        if answer.WhichOneof("response") == "immediate_response":
            return self._outcome(answer, body=body)
        assert answer == ProcessingResponse(request_headers={}), "the pick rides on the answer to the body"
        await self._stream.send(_request_body(body, end_of_stream=True))
        return self._outcome(await self._stream.read(), body=body)

    async def _streamed(self, chunks: Sequence[bytes]) -> Routed | Refused:
        for chunk in chunks:
            await self._stream.send(_request_body(chunk, end_of_stream=False))
        await self._stream.send(_request_body(b"", end_of_stream=True))
        first = await self._stream.read()
        if first.WhichOneof("response") == "immediate_response":
            return self._outcome(first, body=b"")
        body, ended = b"", False
        while not ended:
            answer = await self._stream.read()
            assert answer.WhichOneof("response") == "request_body", answer
            part = answer.request_body.response.body_mutation.streamed_response
            body, ended = body + part.body, part.end_of_stream
        return self._outcome(first, body=body)

    async def _through_second_filter(
        self, headers: ProcessingRequest, note: Mapping[str, Any], chunks: Sequence[bytes]
    ) -> Returned:
        """Envoy enters the filter for responses only where the pick left a note."""
        if not note:
            return Returned(asked_for=False, removed_headers=(), chunks=tuple(chunks))
        message = ProcessingRequest()
        message.CopyFrom(headers)
        message.metadata_context.filter_metadata["kvmesh"].update(dict(note))
        second = _Stream(self._method())
        self._streams.append(second)
        return await self._asked_bodies(second, message, chunks)

    async def _asked_bodies(self, stream: "_Stream", headers: ProcessingRequest, chunks: Sequence[bytes]) -> Returned:
        answer = await self._ask(stream, headers)
        removed = tuple(answer.response_headers.response.header_mutation.remove_headers)
        asked = answer.mode_override.response_body_mode == ProcessingMode.STREAMED
        if not asked:
            return Returned(asked_for=False, removed_headers=removed, chunks=tuple(chunks))
        passed = []
        for i, chunk in enumerate(chunks, start=1):
            message = ProcessingRequest()
            message.response_body.body = chunk
            message.response_body.end_of_stream = i == len(chunks)
            reply = await self._ask(stream, message)
            mutation = reply.response_body.response.body_mutation
            kind = mutation.WhichOneof("mutation")
            passed.append(chunk if kind is None else b"" if kind == "clear_body" else mutation.body)
        return Returned(asked_for=True, removed_headers=removed, chunks=tuple(passed))

    async def _ask(self, stream: "_Stream", message: ProcessingRequest) -> Any:
        await stream.send(message)
        answer = await stream.read()
        self._learn(answer.dynamic_metadata)
        return answer

    # --- what the answers mean ------------------------------------------------------------------------------------

    def _outcome(self, answer: Any, *, body: bytes) -> Routed | Refused:
        kind = answer.WhichOneof("response")
        if kind == "immediate_response":
            return _refused(answer.immediate_response)
        self._learn(answer.dynamic_metadata)
        common = getattr(answer, kind).response
        mutation = common.header_mutation
        values = {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}
        destination = values.pop(DESTINATION)
        assert self._metadata["envoy.lb"] == {DESTINATION: destination}, "the header and the metadata must agree"
        return Routed(
            endpoints=tuple(destination.split(",")),
            body=common.body_mutation.body if common.HasField("body_mutation") else body,
            set_headers=values,
            removed_headers=tuple(mutation.remove_headers),
        )

    def _learn(self, metadata: Struct) -> None:
        for namespace, values in MessageToDict(metadata).items():
            self._metadata.setdefault(namespace, {}).update(values)


class _Stream:
    """One ext_proc stream; every answer has a deadline."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, message: ProcessingRequest) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self._call.write(message)

    async def read(self) -> Any:
        async with asyncio.timeout(DEADLINE_SECONDS):
            answer = await self._call.read()
        assert answer is not grpc.aio.EOF, "the picker ended the stream without an answer"
        return answer

    def cancel(self) -> None:
        self._call.cancel()

    async def close(self) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            if not self._call.done():
                await self._call.done_writing()
            rest = await self._call.read()
            assert rest is grpc.aio.EOF, f"an answer to nothing: {rest}"
            assert await self._call.code() is grpc.StatusCode.OK, await self._call.details()


def _request_body(content: bytes, *, end_of_stream: bool) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_body.body = content
    message.request_body.end_of_stream = end_of_stream
    return message


def _refused(response: Any) -> Refused:
    headers = {each.header.key: each.header.raw_value.decode() for each in response.headers.set_headers}
    return Refused(
        status=response.status.code,
        reason=headers.pop("x-kvmesh-reason"),
        content_type=headers.pop("content-type"),
        error=json.loads(response.body)["error"],
        retry_after=headers.pop("retry-after", None),
        request_id=headers.pop("x-request-id", None),
        decision_id=headers.pop("x-kvmesh-decision-id", None),
        headers=headers,
    )

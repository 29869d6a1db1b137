"""One HTTP exchange in Envoy's ext_proc protocol: a state machine without I/O, from events to steps.

`ext_proc.call` feeds it and carries out its steps; `ext_proc.answers` encodes them. The protocol, mode by mode:

* FULL_DUPLEX_STREAMED: nothing is answered until the body has ended; then the headers (with the pick), the body in
  chunks, and the trailers if there were any.
* BUFFERED: the headers are answered at once, the pick goes into the answer to the body.
* any other mode, and requests without a body: the pick goes into the answer to the headers;
* two-way requests (WebSockets, gRPC, CONNECT) in every mode: the pick goes into the answer to the headers. In BUFFERED
  mode that answer switches the body off; in FULL_DUPLEX_STREAMED mode each chunk is sent back as it comes.

The picker's response headers go into the answer to the response headers, which every mode has. By default Envoy sends
no response bodies. To read or change one, the picker requests it in the answer to its headers. With request bodies in
FULL_DUPLEX_STREAMED mode Envoy refuses that: there a second ext_proc filter, which Envoy enters only if the pick left a
note, sends the response on a separate stream.

All unfinished bodies share a bound, because a client may start any number and finish none. Beyond it the largest gives
way, not the newest: small bodies always get through, even if other clients hoard.
"""

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Protocol

import msgspec

from extproc.answers.response_plan import ResponseHandling, ResponsePlan
from extproc.errors import BadUpgradeError, BodyInPiecesError, BodyTooLargeError, KvmeshError
from extproc.requests.form_body import is_upload

# Envoy recommends at most 64 KiB per message in full-duplex mode; the rest is for the message's other fields
BODY_CHUNK_BYTES = 62_000
MOST_CHUNKS = 8  # of a body, before they are joined
HELD_BODY_BYTES = 256 << 20  # of all bodies together, unless the settings set another bound
UPLOAD_BYTES_PER_BODY_BYTE = 2  # by default 32 MiB for an upload: vLLM takes audio of 25 MB
# of one body: 16 MiB in frames of 16 KiB are 1,024 pieces, and no client cuts long bodies into pieces of a few bytes
PIECES_OF_ANY_BODY = 2_048
BYTES_PER_FURTHER_PIECE = 1_024
_SIZES = 64  # size classes: numbers of bits


class Upload(Protocol):
    """An unfinished body."""

    def give_way(self) -> None:
        """Refuse the body, with an answer for its client. It must be released before this returns."""


class Uploads:
    """All unfinished bodies of a picker."""

    def __init__(self, *, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.received_bytes = 0  # total over all bodies, without single-message ones
        self.gave_way = 0
        self._sizes: dict[Upload, int] = {}
        self._alike: list[dict[Upload, None]] = [{} for _ in range(_SIZES)]  # by size class, in order of reaching it

    def hold(self, upload: Upload, size: int) -> None:
        """Record that a body has grown to `size` bytes. Beyond the bound the largest give way, perhaps this one."""
        before = self._sizes.get(upload)
        self._sizes[upload] = size
        if before is None:
            self._alike[size.bit_length()][upload] = None
        elif before.bit_length() != size.bit_length():
            del self._alike[before.bit_length()][upload]
            self._alike[size.bit_length()][upload] = None
        self.held_bytes += size - (before or 0)
        self.received_bytes += size - (before or 0)
        while self.held_bytes > self.most_bytes:
            self.gave_way += 1
            self._largest().give_way()

    def release(self, upload: Upload) -> None:
        """Forget a body that has ended or is no longer needed. Does nothing if it is not held."""
        size = self._sizes.pop(upload, None)
        if size is not None:
            del self._alike[size.bit_length()][upload]
            self.held_bytes -= size

    def _largest(self) -> Upload:
        """Return the body that has been in the largest size class (powers of two) for longest."""
        return next(iter(next(alike for alike in reversed(self._alike) if alike)))


class OutOfOrderError(KvmeshError):
    """The peer sends messages in an order that no Envoy does: the stream ends."""


class BodyMode(IntEnum):
    """`envoy.extensions.filters.http.ext_proc.v3.ProcessingMode.BodySendMode`."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


NO_HEADERS: Mapping[str, str] = MappingProxyType({})
# A service begins with a capital. Other paths may be of JSON APIs, whose bodies are read whatever their content-type.
_GRPC_PATH = re.compile(r"/(?:\w+\.)*[A-Z]\w*/\w+")


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The request headers that matter to the picker."""

    method: str
    path: str
    objective: str | None  # `x-gateway-inference-objective`
    request_id: str
    traceparent: str | None = None  # W3C trace context
    headers: Mapping[str, str] = NO_HEADERS  # further requested headers; lowercase names
    subset: frozenset[str] | None = None  # the route's candidates, or None for all; empty if none may serve
    # requested claims of the JWT verified by Envoy; "a.b" is b within a, a list has one line per entry
    claims: Mapping[str, str] = NO_HEADERS
    pool: str = ""  # "namespace/name" from the call's metadata, or ""
    # the cluster that Envoy chose, "" if its filter is not configured to send it. On a route with weighted backends
    # only this identifies the request's backend: the metadata belongs to the route
    cluster: str = ""
    # the `:authority` of Envoy's call: a native InferencePool's filter identifies the pool in no other way
    called_as: str = ""

    @property
    def is_two_way(self) -> bool:
        """Whether the client may send until the pod ends the exchange, if the request does not end with its headers."""
        if self.method == "CONNECT" or (self.method == "GET" and "upgrade" in self.headers):
            return True
        is_grpc = self.headers.get("content-type", "").startswith("application/grpc")
        return is_grpc and _GRPC_PATH.fullmatch(self.path) is not None


# --- steps: the caller's next actions, in order --------------------------------------------------------------------


class Pick(msgspec.Struct, frozen=True):
    """Choose an endpoint for this request, then call `Exchange.picked`."""

    facts: RequestFacts
    body: bytes | None  # None if Envoy does not send it whole


class Answer(IntEnum):
    """Empty answers, one for each message that Envoy may send."""

    REQUEST_HEADERS = 1
    REQUEST_BODY = 2
    REQUEST_TRAILERS = 3
    RESPONSE_HEADERS = 4
    RESPONSE_BODY = 5
    RESPONSE_TRAILERS = 6


class HeadersWithPick(msgspec.Struct, frozen=True):
    """Answer the request headers with the chosen endpoints."""

    endpoints: Sequence[str]
    removed_headers: tuple[str, ...] = ()
    note: ResponsePlan | None = None  # for the response filter
    set_headers: Mapping[str, str] = NO_HEADERS  # replace the client's
    without_body: bool = False  # Envoy passes the body on without the picker


class BodyWithPick(msgspec.Struct, frozen=True):
    """Answer the buffered body with the chosen endpoints."""

    endpoints: Sequence[str]
    removed_headers: tuple[str, ...] = ()
    body: bytes | None = None  # replaces the client's body; None keeps it
    set_headers: Mapping[str, str] = NO_HEADERS  # replace the client's


class SetResponseHeaders(msgspec.Struct, frozen=True):
    """Answer the response headers with headers that replace the pod's."""

    headers: Mapping[str, str]  # lowercase names


class AskForResponse(msgspec.Struct, frozen=True):
    """Answer the response headers, and request the body in chunks as it arrives."""

    changes: bool  # the body will have another length
    headers: Mapping[str, str] = NO_HEADERS  # as in SetResponseHeaders


class ChangedResponse(msgspec.Struct, frozen=True):
    """Answer a part of the response's body with replacement bytes, perhaps none."""

    body: bytes


class BodyChunk(msgspec.Struct, frozen=True):
    """Pass on a part of the body."""

    body: bytes
    end_of_stream: bool
    response: bool = False  # part of the response's body, echoed in full-duplex mode


Step = (
    Pick | Answer | HeadersWithPick | BodyWithPick | BodyChunk | SetResponseHeaders | AskForResponse | ChangedResponse
)
NOTHING: tuple[Step, ...] = ()


class Exchange:
    """The state of one exchange; each event method takes one event and returns the resulting steps."""

    def __init__(self, *, max_body_bytes: int) -> None:
        self.facts: RequestFacts | None = None  # of the request; None before its headers, and for a response alone
        self._max_body_bytes = max_body_bytes
        self._mode = BodyMode.NONE
        self._response_mode = BodyMode.NONE
        self._chunks: list[bytes | bytearray] = []
        self._pieces = 0
        self._body = b""  # the whole body, while the pick is pending
        self.received_bytes = 0  # of the request body
        self._header_only = False
        self._is_two_way = False
        self._ended_by_trailers = False
        self._picked = False

    def request_headers(
        self, facts: RequestFacts, *, mode: BodyMode, response_mode: BodyMode, end_of_stream: bool
    ) -> Sequence[Step]:
        """Take the request headers; the modes say how the bodies will come. Raise BadUpgradeError."""
        if self.facts is not None:
            return (Answer.REQUEST_HEADERS,)  # no Envoy does this; a second pick would lose the first one's booking
        self.facts = facts
        self._mode = mode
        self._response_mode = response_mode
        self._is_two_way = facts.is_two_way and not end_of_stream
        if not self._is_two_way and not end_of_stream and "websocket" in facts.headers.get("upgrade", "").lower():
            raise BadUpgradeError("a WebSocket begins with a GET")  # Envoy would never end the body
        is_read = mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED)
        self._header_only = end_of_stream or self._is_two_way or not is_read
        if self._header_only:
            return (Pick(facts, b"" if end_of_stream else None),)
        return (Answer.REQUEST_HEADERS,) if mode is BodyMode.BUFFERED else NOTHING

    def request_body(self, chunk: bytes, *, end_of_stream: bool) -> Sequence[Step]:
        """Take a part of the request body. Raise PickError as soon as the body is too large or in too many pieces."""
        if self.sends_back:
            self._is_two_way = not end_of_stream
            return chunks_of(chunk, end_of_stream=end_of_stream)
        if self._header_only or self._picked:
            return (Answer.REQUEST_BODY,)
        if self.facts is None:
            raise OutOfOrderError("a request body before its headers")
        self.received_bytes += len(chunk)
        if self.received_bytes > self._max_body_bytes:
            most, remedy = self._max_body_bytes, "shorten the prompt"
            if is_upload(self.facts.headers.get("content-type", "")):
                most, remedy = UPLOAD_BYTES_PER_BODY_BYTE * most, "send a smaller file"
            if self.received_bytes > most:
                words = f"is larger than {most} bytes; {remedy} or ask the operator to raise max_body_bytes"
                raise BodyTooLargeError(f"the request body {words}")
        if chunk:  # the last one is usually empty
            self._take(chunk)
        if end_of_stream or self._mode is BodyMode.BUFFERED:
            return self._ask()
        return NOTHING

    def request_trailers(self) -> Sequence[Step]:
        """Take the request trailers, which end a streamed body."""
        if self._mode is BodyMode.FULL_DUPLEX_STREAMED and not self._picked and not self._header_only:
            self._ended_by_trailers = True
            return self._ask()
        self._is_two_way = False
        return (Answer.REQUEST_TRAILERS,)

    def picked(
        self,
        endpoints: Sequence[str],
        *,
        body: bytes | None = None,
        removed_headers: tuple[str, ...] = (),
        set_headers: Mapping[str, str] = NO_HEADERS,
        plan: ResponsePlan | None = None,
    ) -> Sequence[Step]:
        """Take the requested pick and return the answers that waited for it.

        `body` replaces the client's; `plan` is for the response.
        """
        self._picked = True
        note = plan if plan is not None and plan.wants_body and self.response_comes_elsewhere else None
        if self._header_only:
            # the picker has not seen the body, so neither it nor the headers that describe it change
            removed = removed_headers if body is None else ()
            without_body = self._is_two_way and self._mode in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL)
            return (HeadersWithPick(endpoints, removed, note, set_headers, without_body),)
        asked, self._body = self._body, b""
        if self._mode is BodyMode.BUFFERED:
            return (BodyWithPick(endpoints, removed_headers, body, set_headers),)
        chunks = chunks_of(asked if body is None else body, end_of_stream=not self._ended_by_trailers)
        steps: list[Step] = [HeadersWithPick(endpoints, removed_headers, note, set_headers), *chunks]
        if self._ended_by_trailers:
            steps.append(Answer.REQUEST_TRAILERS)
        return steps

    def forget_body(self) -> None:
        """Drop the received parts of the request body: they are no longer needed."""
        self._chunks = []
        self._body = b""

    @property
    def sends_back(self) -> bool:
        """Whether Envoy gets the rest of the request only from this stream, chunk by chunk."""
        return self._is_two_way and self._mode is BodyMode.FULL_DUPLEX_STREAMED

    @property
    def response_comes_elsewhere(self) -> bool:
        """Whether the response's body can only come on a separate stream."""
        return self._mode is BodyMode.FULL_DUPLEX_STREAMED and self._response_mode is BodyMode.NONE

    def response_headers(
        self, handling: ResponseHandling, *, end_of_stream: bool, headers: Mapping[str, str] = NO_HEADERS
    ) -> Sequence[Step]:
        """Take the response headers. `handling` says what to do with the body; `headers` replace the pod's."""
        if handling is ResponseHandling.PASS or end_of_stream or self.response_comes_elsewhere:
            return (SetResponseHeaders(headers) if headers else Answer.RESPONSE_HEADERS,)
        if self._response_mode is BodyMode.NONE:
            self._response_mode = BodyMode.STREAMED
        return (AskForResponse(changes=handling is ResponseHandling.REWRITE, headers=headers),)

    def response_body(self, chunk: bytes, *, end_of_stream: bool, changed: bytes | None = None) -> Sequence[Step]:
        """Pass on a part of the response, or `changed` in place of it."""
        if self._response_mode is not BodyMode.FULL_DUPLEX_STREAMED:
            return (Answer.RESPONSE_BODY if changed is None or changed == chunk else ChangedResponse(changed),)
        body = chunk if changed is None else changed
        if not body and not end_of_stream:
            return NOTHING
        return chunks_of(body, end_of_stream=end_of_stream, response=True)

    def _take(self, chunk: bytes) -> None:
        chunks = self._chunks
        chunks.append(chunk)
        self._pieces += 1
        most = PIECES_OF_ANY_BODY + self.received_bytes // BYTES_PER_FURTHER_PIECE
        if self._pieces > most:
            raise BodyInPiecesError(
                f"the first {self.received_bytes} bytes of the request body come in more than {most} pieces; "
                "send it in larger ones"
            )
        if len(chunks) > MOST_CHUNKS:
            # join them: a block this large returns to the system when freed, small pieces do not
            whole = chunks[0] if isinstance(chunks[0], bytearray) else bytearray(chunks[0])
            for each in chunks[1:]:
                whole += each
            self._chunks = [whole]

    def _ask(self) -> Sequence[Step]:
        assert self.facts is not None, "no body is taken before the headers"
        # usually a single chunk, which must not be copied
        first = self._chunks[0] if self._chunks else b""
        self._body = first if len(self._chunks) == 1 and isinstance(first, bytes) else b"".join(self._chunks)
        self._chunks = []
        return (Pick(self.facts, self._body),)


def chunks_of(body: bytes, *, end_of_stream: bool, response: bool = False) -> Sequence[BodyChunk]:
    """Cut a body into messages: at least one, perhaps empty."""
    if len(body) <= BODY_CHUNK_BYTES:
        return (BodyChunk(body, end_of_stream=end_of_stream, response=response),)
    last = (len(body) - 1) // BODY_CHUNK_BYTES
    return [
        BodyChunk(
            body[i * BODY_CHUNK_BYTES : (i + 1) * BODY_CHUNK_BYTES],
            end_of_stream=end_of_stream and i == last,
            response=response,
        )
        for i in range(last + 1)
    ]

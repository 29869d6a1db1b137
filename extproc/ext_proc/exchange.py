"""One HTTP exchange in Envoy's ext_proc protocol: a state machine without I/O, fed with events, answering with steps.

`ext_proc.call` feeds it and carries out its steps; `ext_proc.answers` encodes them. The protocol, mode by mode:

* FULL_DUPLEX_STREAMED: nothing is answered until the body has ended; then headers (with the pick), the same body in
  chunks, and the trailers if there were any.
* BUFFERED: the headers are answered at once, the pick rides on the answer to the body.
* any other mode, and requests without a body: the pick rides on the answer to the headers.

Response headers that the picker sets ride on the answer to the response headers, which every mode has. Response bodies
do not come by default. A response that must be read or changed is asked for in the answer to its headers. Envoy refuses
that where request bodies are FULL_DUPLEX_STREAMED; there a second ext_proc filter, which Envoy enters only if the pick
left a note, gets the response on a stream of its own.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

import msgspec

from extproc.errors import BodyInPiecesError, BodyTooLargeError, KvmeshError
from extproc.ext_proc.uploads import BYTES_PER_FURTHER_PIECE, PIECES_OF_ANY_BODY
from extproc.responses.response_plan import ResponseHandling, ResponsePlan

# Envoy recommends at most 64 KiB a message in full-duplex mode; a little room is left for the message's own fields
BODY_CHUNK_BYTES = 62_000
MOST_CHUNKS = 8  # of a body, before they become one


class OutOfOrderError(KvmeshError):
    """The peer sends what no Envoy sends: the stream ends."""


class BodyMode(IntEnum):
    """`envoy.extensions.filters.http.ext_proc.v3.ProcessingMode.BodySendMode`."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The request headers that matter to the picker."""

    method: str
    path: str
    objective: str | None  # `x-gateway-inference-objective`
    request_id: str
    traceparent: str | None = None  # W3C trace context
    headers: Mapping[str, str] = NO_HEADERS  # further ones that were asked for; lowercase names
    subset: frozenset[str] | None = None  # the route's candidates; None: all. Empty: none may serve
    # of the JWT that Envoy has verified, those that were asked for; "a.b" is b within a, lists have a line an entry
    claims: Mapping[str, str] = NO_HEADERS
    pool: str = ""  # "namespace/name", as the call's metadata names it; "" where it does not
    # the cluster that Envoy chose, "" if its filter is not configured to send it. On a route with weighted backends
    # only this identifies the backend that the request is for: the metadata is the route's
    cluster: str = ""
    # the name by which Envoy calls the picker: a native InferencePool's filter says nothing else of the pool
    called_as: str = ""


# --- steps: what the caller must do next, in order -----------------------------------------------------------------


class Pick(msgspec.Struct, frozen=True):
    """Choose an endpoint for this request, then call `Exchange.picked`."""

    facts: RequestFacts
    body: bytes | None  # None: Envoy does not send it whole


class Answer(IntEnum):
    """Answers without content, one for each message that Envoy may send."""

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
    note: ResponsePlan | None = None  # for the filter that will have the response
    set_headers: Mapping[str, str] = NO_HEADERS  # over what the client sent


class BodyWithPick(msgspec.Struct, frozen=True):
    """Answer the buffered body with the chosen endpoints."""

    endpoints: Sequence[str]
    removed_headers: tuple[str, ...] = ()
    body: bytes | None = None  # in place of what came; None: unchanged
    set_headers: Mapping[str, str] = NO_HEADERS  # over what the client sent


class SetResponseHeaders(msgspec.Struct, frozen=True):
    """Answer the response headers with headers that replace the pod's."""

    headers: Mapping[str, str]  # lowercase names


class AskForResponse(msgspec.Struct, frozen=True):
    """Answer the response headers and have the body sent in the chunks in which it comes."""

    changes: bool  # the body will have another length
    headers: Mapping[str, str] = NO_HEADERS  # as in SetResponseHeaders


class ChangedResponse(msgspec.Struct, frozen=True):
    """Answer a part of the response's body with other bytes, perhaps none."""

    body: bytes


class BodyChunk(msgspec.Struct, frozen=True):
    """Send a part of the body on."""

    body: bytes
    end_of_stream: bool
    response: bool = False  # part of the response's body, echoed where Envoy is set up to send it


Step = (
    Pick | Answer | HeadersWithPick | BodyWithPick | BodyChunk | SetResponseHeaders | AskForResponse | ChangedResponse
)
NOTHING: tuple[Step, ...] = ()


class Exchange:
    """The state of one exchange; every method takes one message of Envoy's and returns the steps it calls for."""

    def __init__(self, *, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._mode = BodyMode.NONE
        self._response_mode = BodyMode.NONE
        self._facts: RequestFacts | None = None
        self._chunks: list[bytes | bytearray] = []
        self._pieces = 0
        self._body = b""  # whole, from the time when a pick is asked for until it is made
        self.received_bytes = 0  # of the request body
        self._header_only = False
        self._ended_by_trailers = False
        self._picked = False

    def request_headers(
        self, facts: RequestFacts, *, mode: BodyMode, response_mode: BodyMode, end_of_stream: bool
    ) -> Sequence[Step]:
        """Take the request headers; the modes say how the bodies will come."""
        if self._facts is not None:
            return (Answer.REQUEST_HEADERS,)  # no Envoy does this, and a second pick would lose the first one's booking
        self._facts = facts
        self._mode = mode
        self._response_mode = response_mode
        self._header_only = end_of_stream or mode not in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED)
        if self._header_only:
            return (Pick(facts, b"" if end_of_stream else None),)
        return (Answer.REQUEST_HEADERS,) if mode is BodyMode.BUFFERED else NOTHING

    def request_body(self, chunk: bytes, *, end_of_stream: bool) -> Sequence[Step]:
        """Take a part of the request body. Raise PickError as soon as it is too large or in too many pieces."""
        if self._header_only or self._picked:
            return (Answer.REQUEST_BODY,)
        if self._facts is None:
            raise OutOfOrderError("a request body before its headers")
        self.received_bytes += len(chunk)
        if self.received_bytes > self._max_body_bytes:
            raise BodyTooLargeError(
                f"the request body is larger than {self._max_body_bytes} bytes; shorten the prompt "
                "or ask the operator to raise max_body_bytes"
            )
        if chunk:  # the last one is empty, mostly
            self._take(chunk)
        if end_of_stream or self._mode is BodyMode.BUFFERED:
            return self._ask()
        return NOTHING

    def request_trailers(self) -> Sequence[Step]:
        """Take the request trailers, which end a body that was streamed."""
        if self._mode is BodyMode.FULL_DUPLEX_STREAMED and not self._picked and not self._header_only:
            self._ended_by_trailers = True
            return self._ask()
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
        """Take the pick that was asked for and return the answers that were held back for it.

        `body` goes to the pod in place of the client's; `plan` is for the response.
        """
        self._picked = True
        note = plan if plan is not None and plan.wants_body and self.response_comes_elsewhere else None
        if self._header_only:
            # a body that is not seen is not changed, nor are the headers that describe it
            return (HeadersWithPick(endpoints, removed_headers if body is None else (), note, set_headers),)
        asked, self._body = self._body, b""
        if self._mode is BodyMode.BUFFERED:
            return (BodyWithPick(endpoints, removed_headers, body, set_headers),)
        chunks = chunks_of(asked if body is None else body, end_of_stream=not self._ended_by_trailers)
        steps: list[Step] = [HeadersWithPick(endpoints, removed_headers, note, set_headers), *chunks]
        if self._ended_by_trailers:
            steps.append(Answer.REQUEST_TRAILERS)
        return steps

    def forget_body(self) -> None:
        """Let go of what has come of the request body: nobody will ask for it."""
        self._chunks = []
        self._body = b""

    @property
    def request_id(self) -> str:
        """What Envoy and the client call the request, "" where nobody has named it."""
        return self._facts.request_id if self._facts is not None else ""

    @property
    def is_response_alone(self) -> bool:
        """Tell whether this stream has had no request: it belongs to the filter that sees responses only."""
        return self._facts is None

    @property
    def response_comes_elsewhere(self) -> bool:
        """Tell whether the response's body cannot be had on this stream."""
        return self._mode is BodyMode.FULL_DUPLEX_STREAMED and self._response_mode is BodyMode.NONE

    def response_headers(
        self, handling: ResponseHandling, *, end_of_stream: bool, headers: Mapping[str, str] = NO_HEADERS
    ) -> Sequence[Step]:
        """Take the response headers, and what is wanted of the body; `headers` replace the pod's."""
        if handling is ResponseHandling.PASS or end_of_stream or self.response_comes_elsewhere:
            return (SetResponseHeaders(headers) if headers else Answer.RESPONSE_HEADERS,)
        if self._response_mode is BodyMode.NONE:
            self._response_mode = BodyMode.STREAMED
        return (AskForResponse(changes=handling is ResponseHandling.REWRITE, headers=headers),)

    def response_body(self, chunk: bytes, *, end_of_stream: bool, changed: bytes | None = None) -> Sequence[Step]:
        """Let a part of the response pass, or `changed` in its place."""
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
            # what is as large as this is given back to the system when it is freed, and pieces are not
            whole = chunks[0] if isinstance(chunks[0], bytearray) else bytearray(chunks[0])
            for each in chunks[1:]:
                whole += each
            self._chunks = [whole]

    def _ask(self) -> Sequence[Step]:
        assert self._facts is not None, "no body is taken before the headers"
        # mostly one chunk, which must not be copied
        first = self._chunks[0] if self._chunks else b""
        self._body = first if len(self._chunks) == 1 and isinstance(first, bytes) else b"".join(self._chunks)
        self._chunks = []
        return (Pick(self._facts, self._body),)


def chunks_of(body: bytes, *, end_of_stream: bool, response: bool = False) -> Sequence[BodyChunk]:
    """Cut a body into messages; at least one, which may be empty."""
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

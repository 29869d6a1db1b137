"""One ext_proc stream: feeds an `Exchange`, carries out its steps, and holds the pick until the exchange is over.

`grpc_server` opens one for each stream to the processor. All is done while the message is handled but the pick, which
may wait: it runs in a task, and messages that come meanwhile wait in the stream. Decides nothing: picks come through
`Picks`.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from extproc.adapters.grpc_stream import GrpcStream
from extproc.core.exchange import Answer, Exchange, Pick, RequestFacts, Step
from extproc.errors import InternalPickError, PickError
from extproc.wire import ext_proc
from extproc.wire.grpc_messages import GrpcError, GrpcStatus

log = logging.getLogger(__name__)


class OpenExchange(Protocol):
    """What a pick holds until its exchange ends."""

    @property
    def endpoints(self) -> Sequence[str]:
        """The winner, then the fallbacks in order."""

    def responded(self, *, status: int, served_by: str | None) -> None:
        """Take note of the pod's HTTP status and of which pod it was, where Envoy tells."""

    def finish(self) -> None:
        """Release what the pick holds: the exchange is over, whatever ended it. Called exactly once."""


class Picks(Protocol):
    """Where picks come from."""

    async def pick(self, facts: RequestFacts, body: bytes | None) -> OpenExchange:
        """Choose and book, or raise PickError with the answer for the client."""


class ExtProcCalls:
    """What all ext_proc streams of a server share."""

    def __init__(self, *, picks: Picks, max_body_bytes: int) -> None:
        self.picks = picks
        self.max_body_bytes = max_body_bytes
        self.releasing = False  # streams whose response has begun are ended
        self.open: set[ExtProcCall] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # one a pick that is awaited; ended with its stream

    def serve(self, stream: GrpcStream) -> "ExtProcCall":
        """Serve a stream."""
        return ExtProcCall(stream, self)

    def release_answered(self) -> None:
        """End each stream whose response has begun, now and from now on."""
        self.releasing = True
        for call in list(self.open):
            call.release_if_answered()


class ExtProcCall:
    """One HTTP exchange. Its stream's end is the end of the exchange, however that came about."""

    __slots__ = ("_answered", "_calls", "_exchange", "_over", "_picked", "_stream", "_task")

    def __init__(self, stream: GrpcStream, calls: ExtProcCalls) -> None:
        self._stream = stream
        self._calls = calls
        self._exchange = Exchange(max_body_bytes=calls.max_body_bytes)
        self._picked: OpenExchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._answered = False
        self._over = False
        calls.open.add(self)

    # --- grpc_stream.Call -----------------------------------------------------------------------------------------

    def message(self, data: bytes) -> None:
        """Take one of Envoy's messages."""
        try:
            message = ext_proc.parse_message(data)
        except DecodeError as error:
            raise GrpcError(GrpcStatus.INTERNAL, "the message cannot be decoded as a ProcessingRequest") from error
        try:
            steps = steps_of(self._exchange, message)
            if message.HasField("response_headers"):
                self._note_response(message)
            if len(steps) == 1 and isinstance(pick := steps[0], Pick):
                self._start(pick)
                return
            self._carry_out(steps)
        except PickError as refusal:
            self._refuse(refusal)
        except Exception:
            self._fail()
        if self._answered and self._calls.releasing:
            self._stream.finish()

    def half_closed(self) -> None:
        """End the stream: Envoy says nothing more."""
        self._stream.finish()

    def ended(self) -> None:
        """Release the pick, or give it up."""
        self._over = True
        self._calls.open.discard(self)
        if self._task is not None:
            self._task.cancel()
        if self._picked is not None:
            self._picked.finish()

    # --------------------------------------------------------------------------------------------------------------

    def release_if_answered(self) -> None:
        """Let go of the exchange if its response has begun: Envoy finishes it without us."""
        if self._answered:
            self._stream.finish()
            self._stream.flush()

    def _start(self, pick: Pick) -> None:
        self._stream.hold()
        task = asyncio.get_running_loop().create_task(self._pick(pick), name=f"pick {pick.facts.request_id}")
        self._task = task
        self._calls.tasks.add(task)
        task.add_done_callback(self._calls.tasks.discard)

    async def _pick(self, pick: Pick) -> None:
        """Await the pick and answer with it."""
        try:
            picked = await self._calls.picks.pick(pick.facts, pick.body)
            if self._over:
                picked.finish()  # a pick that would not be cancelled
                return
            self._picked = picked
            self._carry_out(self._exchange.picked(picked.endpoints))
        except PickError as refusal:
            self._refuse(refusal)
        except asyncio.CancelledError:
            # by the stream's end, which has seen to everything; or by somebody else, and then the stream ends now
            self._stream.finish(GrpcStatus.UNAVAILABLE, "the pick was cancelled")
            raise
        except Exception:
            self._fail()
        finally:
            self._task = None
            self._stream.release()
            self._stream.flush()

    def _note_response(self, message: Any) -> None:
        self._answered = True
        if self._picked is not None:
            self._picked.responded(
                status=ext_proc.response_status(message.response_headers), served_by=ext_proc.served_by(message)
            )

    def _carry_out(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._stream.send(ext_proc.encode_step(step))

    def _refuse(self, refusal: PickError) -> None:
        """Answer the client in the pod's place; that is the exchange's last message."""
        self._stream.send(ext_proc.encode_refusal(refusal))
        self._stream.finish()

    def _fail(self) -> None:
        log.exception("an exchange failed; the client gets a 500")
        self._refuse(InternalPickError("kvmesh failed to route this request; its log says why"))


def steps_of(exchange: Exchange, message: Any) -> Sequence[Step]:
    """Feed one message to the exchange."""
    kind = message.WhichOneof("request")
    if kind == "request_headers":
        headers = message.request_headers
        return exchange.request_headers(
            ext_proc.request_facts(headers),
            mode=ext_proc.request_body_mode(message),
            response_mode=ext_proc.response_body_mode(message),
            end_of_stream=headers.end_of_stream,
        )
    if kind == "request_body":
        return exchange.request_body(message.request_body.body, end_of_stream=message.request_body.end_of_stream)
    if kind == "request_trailers":
        return exchange.request_trailers()
    if kind == "response_headers":
        return (Answer.RESPONSE_HEADERS,)
    if kind == "response_body":
        return exchange.response_body(message.response_body.body, end_of_stream=message.response_body.end_of_stream)
    return (Answer.RESPONSE_TRAILERS,)

"""One ext_proc stream: feeds an `Exchange`, carries out its steps, and holds the pick until the exchange is over.

`grpc_server` opens one call per stream. Only the pick may wait: it runs in a task, and further messages wait in the
stream meanwhile. All other work is done while the message is handled.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from extproc.answers.response_plan import Miss, ResponseHandling, ResponsePlan
from extproc.errors import DEFECT, InternalPickError, PickError, UploadsLimitedError
from extproc.ext_proc import answers as ext_proc
from extproc.ext_proc.exchange import (
    HELD_BODY_BYTES,
    Answer,
    BodyChunk,
    Exchange,
    OutOfOrderError,
    Pick,
    RequestFacts,
    Step,
    Uploads,
)
from extproc.ext_proc.messages import BodyPart, HeadersMessage, Message, body_chunk, read_message
from extproc.ext_proc.refusals import REQUEST_ID_HEADER, encode_refusal
from extproc.http2.grpc_messages import GrpcError, GrpcStatus
from extproc.http2.grpc_stream import GrpcStream

log = logging.getLogger(__name__)

# With ten pickers, the chance that one of them gets none of a hundred responses is 1 in 40,000.
NOTES_WITHOUT_RESPONSE = 100
SERVICE_UNAVAILABLE = 503


class OpenExchange(Protocol):
    """A pick with its booking, held until its exchange ends."""

    @property
    def endpoints(self) -> Sequence[str]:
        """The winner, then the fallbacks in order."""

    body: bytes | None
    """The edited body for the pod, or None to pass the client's unchanged. Set to None once sent."""

    @property
    def removed_headers(self) -> tuple[str, ...]:
        """Request headers to remove before the pod: they describe the client's body, or could steer the request."""

    @property
    def set_headers(self) -> Mapping[str, str]:
        """Request headers (lowercase) that replace the client's; mostly none."""

    @property
    def plan(self) -> ResponsePlan:
        """The plan for the response."""

    @property
    def response_headers(self) -> Mapping[str, str]:
        """Response headers (lowercase) that replace the pod's; mostly none."""

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str) -> None:
        """Record the HTTP status and the pod, if Envoy names it, or that Envoy answered in place of a pod.

        `content_type` is set only for a 503: it distinguishes a pod without room from a proxy without a pod.
        """

    def response_missed(self, why: Miss) -> None:
        """Record that the plan cannot be carried out."""

    def finish(self) -> None:
        """Release the booking: the exchange is over, for any reason. Called exactly once."""


class OpenResponse(Protocol):
    """Carries out the plan for one response."""

    def begin(self, head: ext_proc.ResponseHead, *, served_by: str | None) -> ResponseHandling:
        """Return whether to pass, read or rewrite the body."""

    def chunk(self, content: bytes, *, end_of_stream: bool) -> bytes:
        """Take a part of the body and return the bytes to send to the client now; by the end, all of them."""

    @property
    def holds_back(self) -> bool:
        """Whether some bytes were taken but not returned yet."""

    def finish(self) -> None:
        """Conclude: the exchange is over, for any reason. Called once, or never if Envoy goes on without us."""


class Picks(Protocol):
    """The source of picks."""

    async def pick(self, facts: RequestFacts, body: bytes | None) -> OpenExchange:
        """Choose an endpoint and book it, or raise PickError with the answer for the client."""

    def response(self, plan: ResponsePlan) -> OpenResponse:
        """Open a response whose pick, here or on another picker, made this plan."""


class ExtProcCalls:
    """The state shared by all ext_proc streams of a server."""

    def __init__(self, *, picks: Picks, max_body_bytes: int, uploads: Uploads | None = None) -> None:
        self.picks = picks
        self.max_body_bytes = max_body_bytes
        self.uploads = uploads or Uploads(most_bytes=HELD_BODY_BYTES)
        self.wanted_headers = ext_proc.wanted_headers()  # of a request, passed to the pick
        self.claims: frozenset[str] = frozenset()  # of a verified JWT, passed to the pick
        self.releasing = False  # end streams whose response has begun
        self._unseen = 0  # responses expected on a separate stream since the last one that came
        self.open: set[ExtProcCall] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # one per pending pick, cancelled with its stream

    def response_is_missed(self) -> bool:
        """Count a response expected on a separate stream; return True after NOTES_WITHOUT_RESPONSE without any.

        Each may have gone to another picker, but if Envoy had the response filter, some would have come here.
        """
        self._unseen += 1
        if self._unseen < NOTES_WITHOUT_RESPONSE:
            return False
        self._unseen = 0
        return True

    def response_came(self) -> None:
        """Record a response on a separate stream: Envoy has the response filter."""
        self._unseen = 0

    def serve(self, stream: GrpcStream) -> "ExtProcCall":
        """Serve a stream."""
        return ExtProcCall(stream, self)

    def release_answered(self) -> None:
        """End each stream whose response has begun, now and from now on."""
        self.releasing = True
        for call in list(self.open):
            call.release_if_answered()


class ExtProcCall:
    """One HTTP exchange. It ends with its stream, for any reason."""

    __slots__ = ("_answered", "_calls", "_exchange", "_over", "_picked", "_response", "_stream", "_task", "_was_read")

    def __init__(self, stream: GrpcStream, calls: ExtProcCalls) -> None:
        self._stream = stream
        self._calls = calls
        self._exchange = Exchange(max_body_bytes=calls.max_body_bytes)
        self._picked: OpenExchange | None = None
        self._response: OpenResponse | None = None
        self._task: asyncio.Task[None] | None = None
        self._answered = False
        self._over = False
        self._was_read = False  # the response has been read to its end
        calls.open.add(self)

    def message(self, data: bytes) -> None:
        """Handle one message from Envoy."""
        try:
            steps = self._steps(read_message(data, self._calls.wanted_headers))
            if len(steps) == 1 and isinstance(pick := steps[0], Pick):
                self._start(pick)
                return
            self._carry_out(steps)
        except DecodeError as error:
            raise GrpcError(GrpcStatus.INTERNAL, "the message cannot be decoded as a ProcessingRequest") from error
        except OutOfOrderError as error:
            raise GrpcError(GrpcStatus.INTERNAL, str(error)) from error
        except PickError as refusal:
            self._refuse(refusal)
        except Exception:
            self._fail()
        if self._answered and self._calls.releasing and not self._holds_back():
            self._stream.finish()

    def partial(self, size: int) -> None:
        """Account for an incomplete message; it must be part of a body, as no other message is this long."""
        if self._task is None and self._picked is None:
            self._calls.uploads.hold(self, self._exchange.received_bytes + size)

    def half_closed(self) -> None:
        """End the stream: Envoy sends nothing more."""
        self._stream.finish()

    def ended(self) -> None:
        """Release the pick, or cancel it."""
        self._over = True
        self._calls.open.discard(self)
        self._calls.uploads.release(self)
        self._exchange.forget_body()
        if self._task is not None:
            self._task.cancel()
        try:
            # a response released half-way is not over: the client still gets its tokens
            if self._response is not None and (self._was_read or not self._calls.releasing):
                self._response.finish()
        finally:
            if self._picked is not None:
                self._picked.finish()

    def give_way(self) -> None:
        """Refuse an unfinished body: together they hold too much memory."""
        most = self._calls.uploads.most_bytes >> 20
        self._refuse(
            UploadsLimitedError(
                f"the request bodies that are on their way hold more than {most} MiB, and this one is among the "
                "largest; try again later",
                retry_after_seconds=1,
            )
        )
        self._stream.flush()

    def release_if_answered(self) -> None:
        """End the stream if the response has begun: Envoy finishes the exchange without us."""
        if self._answered and not self._holds_back():
            self._stream.finish()
            self._stream.flush()

    def _steps(self, message: Message) -> Sequence[Step]:
        if isinstance(message, BodyPart):
            if message.is_response:
                return self._response_body(message.content, end_of_stream=message.end_of_stream)
            steps = self._exchange.request_body(message.content, end_of_stream=message.end_of_stream)
            if not steps:
                self._calls.uploads.hold(self, self._exchange.received_bytes)
            return steps
        if isinstance(message, HeadersMessage):
            if message.is_response:
                return self._response_headers(message)
            return self._exchange.request_headers(
                ext_proc.request_facts(
                    message,
                    claims=self._calls.claims,
                    pool=self._stream.pool,
                    called_as=self._stream.authority,
                ),
                mode=message.request_mode,
                response_mode=message.response_mode,
                end_of_stream=message.end_of_stream,
            )
        return (Answer.RESPONSE_TRAILERS,) if message.is_response else self._exchange.request_trailers()

    def _start(self, pick: Pick) -> None:
        self._calls.uploads.release(self)
        self._stream.hold()
        task = asyncio.get_running_loop().create_task(self._pick(pick), name=f"pick {pick.facts.request_id}")
        self._task = task
        self._calls.tasks.add(task)
        task.add_done_callback(self._calls.tasks.discard)

    async def _pick(self, pick: Pick) -> None:
        """Await the pick and send it to Envoy."""
        try:
            picked = await self._calls.picks.pick(pick.facts, pick.body)
            if self._over:
                picked.finish()  # the pick completed in spite of its cancellation
                return
            self._picked = picked
            self._carry_out(
                self._exchange.picked(
                    picked.endpoints,
                    body=picked.body,
                    removed_headers=picked.removed_headers,
                    set_headers=picked.set_headers,
                    plan=picked.plan,
                )
            )
            if picked.body is not None:
                picked.body = None  # frees perhaps megabytes, as the exchange may last for minutes
        except PickError as refusal:
            self._refuse(refusal)
        except asyncio.CancelledError:
            # cancelled by the stream's end, which has released everything; after any other cause the stream ends here
            self._stream.finish(GrpcStatus.UNAVAILABLE, "the pick was cancelled")
            raise
        except Exception:
            self._fail()
        finally:
            self._task = None
            self._stream.release()
            self._stream.flush()

    def _response_headers(self, message: HeadersMessage) -> Sequence[Step]:
        self._answered = True
        if self._exchange.facts is None:  # it had no request: a stream of the response filter
            return self._response_alone(message)
        picked = self._picked
        if picked is None:
            return (Answer.RESPONSE_HEADERS,)
        served_by, from_pod = ext_proc.response_origin(message)
        status = ext_proc.response_status(message)
        content_type = message.headers.get("content-type", "") if status == SERVICE_UNAVAILABLE else ""
        picked.responded(status=status, served_by=served_by, from_pod=from_pod, content_type=content_type)
        handling = ResponseHandling.PASS
        if picked.plan.wants_body and from_pod and not message.end_of_stream:
            if not self._exchange.response_comes_elsewhere:
                handling = self._open_response(picked.plan, message, served_by)
            elif self._calls.response_is_missed():
                picked.response_missed(Miss.NO_RESPONSE_FILTER)
        headers, request_id = picked.response_headers, self._exchange.facts.request_id
        if request_id:
            headers = {**headers, REQUEST_ID_HEADER: request_id}
        return self._exchange.response_headers(handling, end_of_stream=message.end_of_stream, headers=headers)

    def _response_alone(self, message: HeadersMessage) -> Sequence[Step]:
        """Serve a stream of the response filter: the pick, here or on another picker, has left its plan in metadata."""
        plan = ext_proc.response_plan(message)
        if plan is None:
            return self._let_go()
        self._calls.response_came()
        if message.end_of_stream:
            return self._let_go()
        handling = self._open_response(plan, message, ext_proc.response_origin(message)[0])
        if handling is ResponseHandling.PASS:
            return self._let_go()
        return self._exchange.response_headers(handling, end_of_stream=False)

    def _let_go(self) -> Sequence[Step]:
        """Send the last answer and end the stream: Envoy goes on without us."""
        self._carry_out((Answer.RESPONSE_HEADERS,))
        self._stream.finish()
        return ()

    def _open_response(self, plan: ResponsePlan, message: HeadersMessage, served_by: str | None) -> ResponseHandling:
        response = self._calls.picks.response(plan)
        self._response = response
        return response.begin(ext_proc.response_head(message), served_by=served_by)

    def _response_body(self, content: bytes, *, end_of_stream: bool) -> Sequence[Step]:
        changed = None
        self._was_read = self._was_read or end_of_stream
        if self._response is not None:
            changed = self._response.chunk(content, end_of_stream=end_of_stream)
        return self._exchange.response_body(content, end_of_stream=end_of_stream, changed=changed)

    def _holds_back(self) -> bool:
        return self._exchange.sends_back or (self._response is not None and self._response.holds_back)

    def _carry_out(self, steps: Iterable[Step]) -> None:
        send = self._stream.send
        for step in steps:
            if isinstance(step, BodyChunk):
                send(*body_chunk(step))
            else:
                send(ext_proc.encode_step(step))

    def _refuse(self, refusal: PickError) -> None:
        self._stream.send(encode_refusal(refusal, self._exchange.facts))
        self._stream.finish()

    def _fail(self) -> None:
        log.exception("an exchange failed; the client gets a 500")
        self._refuse(InternalPickError(DEFECT))

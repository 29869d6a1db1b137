"""One connection in virtual time, without sockets: what time ends, and that nothing stays open, whatever comes."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.answers.response_plan import PASS_PLAN, ResponsePlan
from extproc.errors import MalformedRequestError
from extproc.ext_proc.call import ExtProcCalls, OpenResponse
from extproc.ext_proc.exchange import BodyMode, RequestFacts
from extproc.http2 import frames as http2
from extproc.http2.connection import Http2Connection, Turns
from extproc.http2.limits import Http2Limits
from tests.unit.extproc_http2.http2_peer import framed
from tests.unit.extproc_http2.virtual_loop import FakeTransport, run

PATH = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEADERS = b"".join(
    http2.literal(name, value)
    for name, value in [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", PATH),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
)
GREETING = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0)


def open_stream(stream_id: int, *, timeout: bytes | None = None) -> bytes:
    block = HEADERS + (http2.literal(b"grpc-timeout", timeout) if timeout else b"")
    return http2.frame(http2.HEADERS, http2.END_HEADERS, stream_id, block)


def data(stream_id: int, *messages: bytes, end: bool = False) -> bytes:
    return http2.frame(http2.DATA, http2.END_STREAM if end else 0, stream_id, b"".join(map(framed, messages)))


def request_headers(mode: BodyMode, *, end_of_stream: bool = False) -> bytes:
    message = ProcessingRequest()
    message.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/completions")
    message.request_headers.end_of_stream = end_of_stream
    message.protocol_config.request_body_mode = mode
    encoded: bytes = message.SerializeToString()
    return encoded


def request_body(content: bytes, *, end_of_stream: bool) -> bytes:
    message = ProcessingRequest()
    message.request_body.body = content
    message.request_body.end_of_stream = end_of_stream
    encoded: bytes = message.SerializeToString()
    return encoded


def response_headers() -> bytes:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    encoded: bytes = message.SerializeToString()
    return encoded


@dataclass
class FakeExchange:
    endpoints: Sequence[str] = ("10.0.0.1:8000",)
    finishes: int = 0

    body: bytes | None = None
    removed_headers: tuple[str, ...] = ()
    set_headers: Mapping[str, str] = field(default_factory=dict)
    plan: ResponsePlan = PASS_PLAN
    response_headers: Mapping[str, str] = field(default_factory=dict)

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str) -> None:
        pass

    def response_missed(self, why: str) -> None:
        pass

    def finish(self) -> None:
        self.finishes += 1


@dataclass
class FakePicks:
    """Picks at once, after a while, never, or refuses; `stubborn` picks although it is cancelled."""

    manner: str = "at once"
    exchanges: list[FakeExchange] = field(default_factory=list)
    cancelled: int = 0

    async def pick(self, facts: RequestFacts, body: bytes | None) -> FakeExchange:
        try:
            if self.manner == "refuses":
                raise MalformedRequestError("no")
            if self.manner == "fails":
                raise ZeroDivisionError
            if self.manner == "in a while":
                await asyncio.sleep(1.0)
            if self.manner in ("never", "stubborn"):
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            if self.manner != "stubborn":
                raise
        self.exchanges.append(FakeExchange())
        return self.exchanges[-1]

    def response(self, plan: ResponsePlan) -> OpenResponse:
        raise NotImplementedError


class Rig:
    """A connection that serves ext_proc, on a fake transport. Made inside the loop."""

    def __init__(self, picks: FakePicks, *, limits: Http2Limits | None = None) -> None:
        self.picks = picks
        self.calls = ExtProcCalls(picks=picks, max_body_bytes=100_000)
        self.connections: set[Http2Connection] = set()
        self.transport = FakeTransport()
        self.connection = Http2Connection(
            methods={PATH: self.calls.serve},
            limits=limits or Http2Limits(),
            max_message_bytes=200_000,
            connections=self.connections,
            turns=Turns(),
        )
        self.connection.connection_made(self.transport)

    def send(self, *frames: bytes) -> None:
        self.connection.data_received(b"".join(frames))

    async def lose(self) -> None:
        """The connection is lost; nothing may be left of it."""
        self.connection.connection_lost(None)
        if self.calls.tasks:
            await asyncio.wait(self.calls.tasks, timeout=5.0)
        assert (self.calls.open, self.calls.tasks, self.connection.session.streams) == (set(), set(), {})
        assert (self.connections, self.connection.closed.done()) == (set(), True)
        assert [exchange.finishes for exchange in self.picks.exchanges] == [1] * len(self.picks.exchanges)

    def kinds(self) -> list[tuple[int, int]]:
        """Kind and stream of each frame written since the last call."""
        written, found = b"".join(self.transport.written), []
        self.transport.written.clear()
        while written:
            high, low, kind, _, stream_id = http2.FRAME_HEADER.unpack_from(written)
            found.append((kind, stream_id))
            written = written[9 + (high << 16 | low) :]
        return found

    def goaway(self) -> int | None:
        """The code of the GOAWAY that was written, if one was."""
        written = b"".join(self.transport.written)
        while written:
            high, low, kind, _, _ = http2.FRAME_HEADER.unpack_from(written)
            size = high << 16 | low
            if kind == http2.GOAWAY:
                return int.from_bytes(written[13:17], "big")
            written = written[9 + size :]
        return None


async def moment() -> None:
    """Let the tasks that can run, run."""
    for _ in range(5):
        await asyncio.sleep(0)


# --- reads and writes -------------------------------------------------------------------------------------------


def test_one_read_leads_to_one_write_and_a_pick_to_another() -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks())
        assert len(rig.transport.written) == 1
        rig.transport.written.clear()
        rig.send(GREETING, open_stream(1), data(1, request_headers(BodyMode.FULL_DUPLEX_STREAMED)))
        rig.send(data(1, request_body(b"{}", end_of_stream=True)), http2.frame(http2.PING, 0, 0, bytes(8)))
        assert rig.kinds() == [(http2.SETTINGS, 0), (http2.PING, 0)]
        await moment()
        assert len(rig.transport.written) == 1
        assert rig.kinds() == [(http2.HEADERS, 1), (http2.DATA, 1), (http2.DATA, 1)]
        assert rig.calls.tasks == set()
        rig.send(data(1, response_headers()))
        assert rig.kinds() == [(http2.DATA, 1)]
        await rig.lose()

    run(scenario())


def test_nothing_is_read_while_the_peer_reads_nothing() -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks())
        rig.send(GREETING, open_stream(1), data(1, request_headers(BodyMode.NONE)))
        rig.connection.pause_writing()
        assert not rig.transport.reading
        rig.transport.written.clear()
        await moment()
        assert rig.kinds() == [(http2.HEADERS, 1)]  # not bound by windows; the message waits
        rig.connection.resume_writing()
        assert rig.transport.reading
        assert rig.kinds() == [(http2.DATA, 1)]
        await rig.lose()

    run(scenario())


def test_a_read_that_opens_many_streams_lets_others_go_first() -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks(), limits=Http2Limits(streams_per_turn=2))
        rig.send(GREETING, *map(open_stream, (1, 3, 5, 7, 9)))
        assert (len(rig.calls.open), rig.transport.reading) == (2, False)
        await moment()
        assert (len(rig.calls.open), rig.transport.reading) == (5, True)
        await rig.lose()

    run(scenario())


# --- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"", http2.ErrorCode.PROTOCOL_ERROR),
        (http2.PREFACE, http2.ErrorCode.PROTOCOL_ERROR),
        (GREETING + http2.frame(http2.HEADERS, 0, 1, HEADERS[:5]), http2.ErrorCode.ENHANCE_YOUR_CALM),
    ],
    ids=["no preface", "no SETTINGS", "no end of headers"],
)
def test_a_peer_that_does_not_finish_what_it_began_is_cut_off_after_ten_seconds(
    sent: bytes, code: http2.ErrorCode
) -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks())
        rig.send(sent)
        await asyncio.sleep(9)
        assert rig.goaway() is None
        await asyncio.sleep(1.5)
        assert (rig.goaway(), rig.transport.ended, rig.transport.closing) == (code, True, False)
        await asyncio.sleep(2)
        assert rig.transport.aborted
        await rig.lose()

    run(scenario())


def test_a_silent_peer_is_asked_and_cut_off_when_it_does_not_answer() -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks())
        rig.send(GREETING, open_stream(1), data(1, request_headers(BodyMode.NONE)))
        await asyncio.sleep(29)
        assert (http2.PING, 0) not in rig.kinds()
        await asyncio.sleep(2)
        assert rig.kinds() == [(http2.PING, 0)]
        rig.send(http2.frame(http2.PING, http2.ACK, 0, b"kvmalive"))
        await asyncio.sleep(32)
        assert rig.kinds() == [(http2.PING, 0)]
        assert not rig.transport.aborted
        await asyncio.sleep(11)
        assert rig.transport.aborted
        await rig.lose()

    run(scenario())


def test_a_window_that_stays_shut_ends_the_stream() -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks())
        rig.send(GREETING, http2.settings_frame({http2.Setting.INITIAL_WINDOW_SIZE: 0}), open_stream(1))
        rig.send(data(1, request_headers(BodyMode.NONE)))
        for _ in range(59):
            await asyncio.sleep(1)
            rig.send(http2.frame(http2.PING, 0, 0, bytes(8)))
        assert list(rig.connection.session.streams) == [1]
        rig.kinds()
        await asyncio.sleep(3)
        assert rig.kinds() == [(http2.RST_STREAM, 1)]
        assert (rig.connection.session.streams, rig.picks.exchanges[0].finishes) == ({}, 1)
        await rig.lose()

    run(scenario())


def test_a_peer_that_never_reads_is_cut_off() -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks(), limits=Http2Limits(ping_after_seconds=1e9))
        rig.send(GREETING)
        rig.connection.pause_writing()
        await asyncio.sleep(59)
        assert not rig.transport.aborted
        await asyncio.sleep(2)
        assert rig.transport.aborted
        await rig.lose()

    run(scenario())


@pytest.mark.parametrize("manner", ["never", "at once"])
def test_the_client_s_deadline_ends_the_stream_and_releases_the_pick(manner: str) -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks(manner))
        rig.send(GREETING, open_stream(1, timeout=b"2S"), data(1, request_headers(BodyMode.NONE)))
        await asyncio.sleep(1.9)
        assert len(rig.calls.open) == 1
        rig.kinds()
        await asyncio.sleep(0.2)
        assert rig.kinds() == [(http2.HEADERS, 1), (http2.RST_STREAM, 1)]
        assert (len(rig.calls.open), rig.picks.cancelled) == (0, int(manner == "never"))
        await rig.lose()

    run(scenario())


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manner", ["at once", "in a while", "never", "stubborn", "refuses", "fails"])
@pytest.mark.parametrize("end", ["reset", "lost", "client ends", "cancelled task"])
def test_every_end_of_a_stream_releases_its_pick_exactly_once(manner: str, end: str) -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks(manner))
        rig.send(GREETING, open_stream(1), data(1, request_headers(BodyMode.NONE)))
        await moment()
        if end == "reset":
            rig.send(http2.reset_frame(1, http2.ErrorCode.CANCEL))
            await moment()
        elif end == "client ends":
            rig.send(data(1, end=True))
            await asyncio.sleep(2)
        elif end == "cancelled task":
            for task in rig.calls.tasks:
                task.cancel()
            await moment()
        await rig.lose()

    run(scenario())


def test_a_defect_in_handling_frames_ends_its_connection_alone_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        broken, other = Rig(FakePicks()), Rig(FakePicks())
        other.send(GREETING, open_stream(1))
        broken.send(GREETING, open_stream(1))
        broken.connection.session._window = None  # type: ignore[assignment]
        broken.send(data(1, b""))
        assert (broken.goaway(), broken.transport.ended) == (http2.ErrorCode.INTERNAL_ERROR, True)
        assert (len(broken.calls.open), len(other.calls.open)) == (0, 1)
        await broken.lose()
        await other.lose()

    run(scenario())
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]


def test_a_drained_connection_closes_when_its_last_stream_has_ended() -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks())
        rig.send(GREETING, open_stream(1))
        rig.connection.drain()
        rig.send(http2.frame(http2.PING, http2.ACK, 0, b"kvmdrain"))
        assert not rig.transport.ended
        rig.send(data(1, end=True))
        assert rig.transport.ended
        await rig.lose()

    run(scenario())


def test_answered_streams_are_let_go_of_also_those_that_are_answered_later() -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks())
        rig.send(GREETING)
        for stream_id in (1, 3):
            rig.send(open_stream(stream_id), data(stream_id, request_headers(BodyMode.NONE)))
        await moment()
        rig.send(data(1, response_headers()))
        rig.calls.release_answered()
        assert [exchange.finishes for exchange in rig.picks.exchanges] == [1, 0]
        rig.send(data(3, response_headers()))
        assert [exchange.finishes for exchange in rig.picks.exchanges] == [1, 1]
        await rig.lose()

    run(scenario())


# --- anything -------------------------------------------------------------------------------------------------------

MANNERS = st.sampled_from(["at once", "in a while", "never", "stubborn", "refuses", "fails"])
STREAMS = st.sampled_from([1, 1, 1, 3, 3, 5, 7])
MESSAGES = st.one_of(
    st.builds(request_headers, st.sampled_from(BodyMode), end_of_stream=st.booleans()),
    st.builds(request_body, st.binary(max_size=20), end_of_stream=st.booleans()),
    st.just(response_headers()),
    st.binary(max_size=20),
)
FRAMES = st.one_of(
    st.builds(open_stream, STREAMS),
    st.builds(open_stream, STREAMS, timeout=st.sampled_from([b"1S", b"1n", b"x"])),
    st.builds(data, STREAMS, MESSAGES, end=st.booleans()),
    st.builds(data, STREAMS, MESSAGES, MESSAGES, MESSAGES),
    st.builds(http2.reset_frame, STREAMS, st.just(http2.ErrorCode.CANCEL)),
    st.builds(http2.window_frame, st.sampled_from([0, 1, 3]), st.integers(0, 1 << 30)),
    st.builds(
        http2.settings_frame,
        st.dictionaries(st.sampled_from(http2.Setting), st.sampled_from([0, 1, 1 << 14, 1 << 16, 1 << 31])),
    ),
    st.just(http2.frame(http2.PING, 0, 0, bytes(8))),
    st.builds(http2.frame, st.integers(0, 11), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=30)),
)


def pieces(content: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    return [content[start:end] for start, end in itertools.pairwise(edges)]


async def feed(rig: Rig, content: bytes, cuts: Sequence[int], waits: Sequence[bool]) -> None:
    for number, piece in enumerate(pieces(content, cuts)):
        rig.send(piece)
        if number < len(waits) and waits[number]:
            await moment()


@settings(max_examples=150)
@given(MANNERS, st.lists(FRAMES, max_size=12), st.lists(st.integers(0, 10_000), max_size=6), st.lists(st.booleans()))
def test_no_sequence_of_frames_leaves_anything_open_or_escapes(
    manner: str, frames: list[bytes], cuts: list[int], waits: list[bool]
) -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks(manner))
        await feed(rig, GREETING + b"".join(frames), cuts, waits)
        await rig.lose()

    run(scenario())


@settings(max_examples=150)
@given(st.booleans(), st.binary(max_size=300), st.lists(st.integers(0, 10_000), max_size=6))
def test_no_bytes_leave_anything_open_or_escape(greet: bool, content: bytes, cuts: list[int]) -> None:
    async def scenario() -> None:
        rig = Rig(FakePicks())
        await feed(rig, (GREETING + open_stream(1) if greet else b"") + content, cuts, [])
        await rig.lose()

    run(scenario())


@settings(max_examples=100)
@given(st.lists(FRAMES, max_size=12), st.lists(st.integers(0, 10_000), max_size=12))
def test_frames_split_anywhere_lead_to_the_same_answers(frames: list[bytes], cuts: list[int]) -> None:
    async def scenario(cuts: list[int]) -> bytes:
        rig = Rig(FakePicks("never"))
        await feed(rig, GREETING + b"".join(frames), cuts, [])
        written = b"".join(rig.transport.written)
        await rig.lose()
        return written

    assert run(scenario(cuts)) == run(scenario([]))

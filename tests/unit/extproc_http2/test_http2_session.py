"""One HTTP/2 connection without sockets: streams, windows, errors by their codes, and every limit against abuse."""

import pytest
from hyperframe.frame import HeadersFrame

from extproc.http2 import frames as http2
from extproc.http2.frames import ErrorCode
from extproc.http2.limits import Http2Limits
from extproc.http2.session import FRAMES_PER_LOOK
from tests.unit.extproc_http2.http2_peer import EchoCall, Peer, answer_of, framed


def raw(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return http2.frame(kind, flags, stream_id, payload)


# --- streams -------------------------------------------------------------------------------------------------------


def test_an_exchange_is_answered_in_one_go() -> None:
    peer = Peer()
    assert peer.reply(peer.headers(1), peer.messages(1, b"a", b"b"), peer.data(1, b"", end=True)) == answer_of(
        1, b"a", b"b"
    )
    assert (peer.session.streams, peer.calls[0].ends, peer.calls[0].half_closes) == ({}, 1, 1)


def test_a_stream_that_ends_before_its_client_tells_it_not_to_send_the_rest() -> None:
    peer = Peer()
    peer.reply(peer.headers(1), peer.messages(1, b"a"))
    peer.calls[0].stream.finish()
    assert [peer.in_short(frame) for frame in peer.answers()] == [(1, "0", True), ("reset", 1, "NO_ERROR")]
    # what was on its way is dropped
    assert peer.reply(peer.messages(1, b"late"), peer.window(1, 5), peer.reset(1), peer.headers(1, end=True)) == []


def test_trailers_of_the_client_end_its_side() -> None:
    peer = Peer()
    peer.send(peer.headers(1), peer.messages(1, b"a"))
    assert peer.reply(peer.headers(1, end=True)) == [(1, "0", True)]


def test_trailers_that_do_not_end_the_stream_reset_it() -> None:
    peer = Peer()
    peer.send(peer.headers(1))
    assert peer.reply(peer.headers(1)) == [("reset", 1, "PROTOCOL_ERROR")]
    assert peer.calls[0].ends == 1


def test_messages_wait_while_the_call_holds_and_so_does_the_client_s_end() -> None:
    peer = Peer()
    assert peer.reply(peer.headers(1), peer.messages(1, b"hold", b"x"), peer.messages(1, b"y", end=True)) == answer_of(
        1, b"hold", ended=False
    )
    assert peer.calls[0].messages == [b"hold"]
    peer.calls[0].stream.release()
    assert [peer.in_short(frame) for frame in peer.answers()] == [(1, framed(b"x")), (1, framed(b"y")), (1, "0", True)]


def test_an_exception_ends_its_stream_alone() -> None:
    peer = Peer()
    peer.send(peer.headers(1), peer.headers(3), peer.headers(5))
    replies = peer.reply(
        peer.messages(1, b"boom"), peer.messages(3, b"bad end", end=True), peer.messages(5, b"a", end=True)
    )
    assert replies == [
        (1, "13", True),
        ("reset", 1, "NO_ERROR"),
        *answer_of(3, b"bad end"),
        *answer_of(5, b"a"),
    ]
    assert ([call.ends for call in peer.calls], peer.session.streams) == ([1, 1, 1], {})


def test_a_stream_that_cannot_be_served_ends_alone_also_when_the_client_has_ended_it() -> None:
    def fail(_: object) -> EchoCall:
        raise ZeroDivisionError

    peer = Peer()
    peer.session._methods = {b"/test/Echo": fail}
    assert peer.reply(peer.headers(1), peer.headers(3, end=True)) == [
        (1, "13", True),
        ("reset", 1, "NO_ERROR"),
        (3, "13", True),
    ]
    assert peer.session.streams == {}


def test_a_reset_ends_the_call_once() -> None:
    peer = Peer()
    assert peer.reply(peer.headers(1), peer.reset(1), peer.reset(1)) == []
    assert (peer.calls[0].ends, peer.session.streams) == (1, {})


def test_a_lost_connection_ends_every_call_once() -> None:
    peer = Peer()
    peer.send(peer.headers(1), peer.headers(3), peer.messages(3, b"hold"))
    peer.session.cut_streams()
    peer.calls[1].stream.release()
    assert ([call.ends for call in peer.calls], peer.session.streams) == ([1, 1], {})


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ((":path", "/test/Nothing"), (1, "12", True)),
        (("content-type", "application/json"), (1, "415", True)),
        ((":method", "GET"), (1, "405", True)),
        (("grpc-timeout", "soon"), (1, "13", True)),
    ],
)
def test_requests_that_are_not_ours_are_answered_and_leave_nothing(change: tuple[str, str], answer: object) -> None:
    peer = Peer()
    assert peer.reply(peer.headers(1, change, end=True)) == [answer]
    assert (peer.calls, peer.session.streams) == ([], {})


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"\0\0\1\0\0", "8"), (b"\1\0\0\0\1x", "12")],
    ids=["a message over the limit", "a compressed message"],
)
def test_messages_that_are_not_taken_end_their_stream_with_a_status(content: bytes, status: str) -> None:
    peer = Peer(max_message_bytes=1000)
    assert peer.reply(peer.headers(1), peer.data(1, content)) == [(1, status, True), ("reset", 1, "NO_ERROR")]


def test_a_client_that_ends_in_the_middle_of_a_message_gets_a_status() -> None:
    peer = Peer()
    assert peer.reply(peer.headers(1), peer.data(1, b"\0\0\0\0\5ab", end=True)) == [(1, "13", True)]


def test_padding_and_continuations_change_nothing() -> None:
    peer = Peer()
    block = peer.block()
    frames = [
        raw(http2.HEADERS, http2.PADDED | http2.HAS_PRIORITY, 1, b"\3" + bytes(5) + block[:4] + bytes(3)),
        peer.continuation(1, block[4:9], end=False),
        peer.continuation(1, block[9:], end=True),
        raw(http2.DATA, http2.PADDED | http2.END_STREAM, 1, b"\4" + framed(b"abc") + bytes(4)),
    ]
    assert peer.reply(*frames) == answer_of(1, b"abc")


@pytest.mark.parametrize("piece", [1, 2, 7, 10, 23])
def test_frames_split_anywhere_mean_the_same(piece: int) -> None:
    peer = Peer(greet=False)
    data = b"".join(
        (
            http2.PREFACE,
            peer.settings(INITIAL_WINDOW_SIZE=1000),
            peer.headers(1),
            peer.messages(1, b"a" * 50, b""),
            peer.headers(3, end=False),
            raw(http2.PING, 0, 0, b"12345678"),
            peer.messages(3, b"b", end=True),
            peer.data(1, b"", end=True),
        )
    )
    for start in range(0, len(data), piece):
        peer.session.receive(data[start : start + piece])
    assert [peer.in_short(frame) for frame in peer.answers()] == [
        ("settings", False),
        ("window", 0, (2 << 20) - 65_535),
        ("settings", True),
        *answer_of(1, b"a" * 50, b"", ended=False),
        ("ping", b"12345678", True),
        *answer_of(3, b"b"),
        (1, "0", True),
    ]


# --- windows -------------------------------------------------------------------------------------------------------


def test_windows_are_given_back_for_what_the_call_has_taken_and_not_before() -> None:
    peer = Peer(limits=Http2Limits(stream_window_bytes=100_000, connection_window_bytes=200_000))
    part = b"x" * 15_000
    replies = peer.reply(
        peer.headers(1), peer.data(1, framed(b"y" * 200_000)[:15_000]), *(peer.data(1, part) for _ in range(5))
    )
    assert replies == [("window", 1, 60_000)]  # at half a window; a message that is not whole yet counts as taken
    peer.send(peer.headers(3), peer.messages(3, b"hold"))
    assert peer.reply(*(peer.data(3, part) for _ in range(6))) == []
    assert peer.reply(peer.data(3, part)) == [("window", 0, 105_000), ("reset", 3, "FLOW_CONTROL_ERROR")]


def test_a_stream_that_ends_gives_the_connection_s_window_back() -> None:
    peer = Peer(limits=Http2Limits(stream_window_bytes=100_000, connection_window_bytes=100_000))
    peer.send(peer.headers(1), peer.messages(1, b"hold"))
    assert peer.reply(*(peer.data(1, b"x" * 15_000) for _ in range(6))) == []
    assert peer.reply(peer.reset(1)) == [("window", 0, 90_009)]


def test_more_than_the_connection_s_window_ends_the_connection() -> None:
    peer = Peer(limits=Http2Limits(stream_window_bytes=100_000, connection_window_bytes=100_000))
    frames = [peer.headers(1), peer.messages(1, b"hold"), peer.headers(3), peer.messages(3, b"hold")]
    peer.send(*frames, *(peer.data(stream, b"x" * 10_000) for stream in (1, 3) for _ in range(4)))
    peer.send(peer.data(3, b"x" * 15_000))
    assert peer.fault(peer.data(3, b"x" * 10_000)) is ErrorCode.FLOW_CONTROL_ERROR


def test_the_peer_s_windows_are_kept_and_its_stream_ends_behind_its_bytes() -> None:
    peer = Peer()
    peer.send(peer.settings(INITIAL_WINDOW_SIZE=6))
    assert peer.reply(peer.headers(1), peer.messages(1, b"abcd", end=True)) == [
        (1, "200", False),
        (1, framed(b"abcd")[:6]),
    ]
    assert (list(peer.session.streams), peer.calls[0].ends) == ([1], 1)  # released, though not yet written
    assert peer.reply(peer.window(1, 10)) == [(1, b"bcd"), (1, "0", True)]
    assert peer.session.streams == {}


def test_an_initial_window_that_makes_a_stream_s_too_large_ends_the_connection() -> None:
    peer = Peer()
    peer.send(peer.headers(1), peer.window(1, 1 << 20))
    assert peer.fault(peer.settings(INITIAL_WINDOW_SIZE=(1 << 31) - 1)) is ErrorCode.FLOW_CONTROL_ERROR


def test_new_settings_are_acknowledged_before_anything_is_sent_under_them() -> None:
    peer = Peer()
    peer.send(peer.settings(INITIAL_WINDOW_SIZE=0), peer.headers(1), peer.messages(1, b"a"))
    assert peer.reply(peer.settings(INITIAL_WINDOW_SIZE=100)) == [("settings", True), (1, framed(b"a"))]


# --- bad frames ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (raw(http2.DATA, 0, 0, b"x"), "PROTOCOL_ERROR"),
        (raw(http2.DATA, 0, 5, b"x"), "PROTOCOL_ERROR"),
        (raw(http2.HEADERS, 4, 0, b"\x82"), "PROTOCOL_ERROR"),
        (raw(http2.HEADERS, 4, 2, b"\x82"), "PROTOCOL_ERROR"),
        (raw(http2.HEADERS, 4, 3, b"\xff\xff\xff\xff\xff\xff"), "COMPRESSION_ERROR"),
        (raw(http2.PRIORITY, 0, 0, bytes(5)), "PROTOCOL_ERROR"),
        (raw(http2.RST_STREAM, 0, 1, bytes(3)), "FRAME_SIZE_ERROR"),
        (raw(http2.RST_STREAM, 0, 0, bytes(4)), "PROTOCOL_ERROR"),
        (raw(http2.RST_STREAM, 0, 7, bytes(4)), "PROTOCOL_ERROR"),
        (raw(http2.SETTINGS, 0, 1), "PROTOCOL_ERROR"),
        (raw(http2.SETTINGS, 1, 0, bytes(6)), "FRAME_SIZE_ERROR"),
        (raw(http2.SETTINGS, 0, 0, bytes(5)), "FRAME_SIZE_ERROR"),
        (raw(http2.PUSH_PROMISE, 4, 1, bytes(4)), "PROTOCOL_ERROR"),
        (raw(http2.PING, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
        (raw(http2.PING, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
        (raw(http2.GOAWAY, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
        (raw(http2.GOAWAY, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
        (raw(http2.WINDOW_UPDATE, 0, 0, bytes(4)), "PROTOCOL_ERROR"),
        (raw(http2.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), "FLOW_CONTROL_ERROR"),
        (raw(http2.WINDOW_UPDATE, 0, 1, bytes(3)), "FRAME_SIZE_ERROR"),
        (raw(http2.WINDOW_UPDATE, 0, 9, b"\0\0\0\1"), "PROTOCOL_ERROR"),
        (raw(http2.CONTINUATION, 4, 1, b"\x82"), "PROTOCOL_ERROR"),
        (raw(http2.HEADERS, 0, 3, b"\x83") + raw(http2.PING, 0, 0, bytes(8)), "PROTOCOL_ERROR"),
        (raw(http2.HEADERS, 0, 3, b"\x83") + raw(http2.CONTINUATION, 4, 5, b"\x83"), "PROTOCOL_ERROR"),
        (raw(http2.DATA, 8, 1, b"\5abc"), "PROTOCOL_ERROR"),
        (b"\x00\x40\x01\x00\x00\x00\x00\x00\x01", "FRAME_SIZE_ERROR"),
    ],
)
def test_a_frame_against_the_rules_ends_the_connection_with_its_code(frame: bytes, code: str) -> None:
    peer = Peer()
    peer.send(peer.headers(1))
    assert peer.fault(frame).name == code


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (raw(http2.DATA, 0, 1, b"x"), "STREAM_CLOSED"),
        (raw(http2.WINDOW_UPDATE, 0, 1, bytes(4)), "PROTOCOL_ERROR"),
        (raw(http2.WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"), "FLOW_CONTROL_ERROR"),
        (raw(http2.PRIORITY, 0, 1, bytes(4)), "FRAME_SIZE_ERROR"),
        (raw(http2.HEADERS, 5, 1, b"\x82"), "STREAM_CLOSED"),
    ],
)
def test_a_frame_against_a_stream_s_rules_ends_the_stream_alone(frame: bytes, code: str) -> None:
    peer = Peer()
    peer.send(peer.headers(1), peer.headers(3), peer.messages(1, b"hold", end=True))
    assert peer.reply(frame, peer.messages(3, b"a", end=True)) == [("reset", 1, code), *answer_of(3, b"a")]
    assert peer.calls[0].ends == 1


def test_a_malformed_request_is_reset_and_the_connection_lives_on() -> None:
    peer = Peer()
    assert peer.reply(peer.headers(1, ("connection", "close")), peer.headers(3), peer.messages(3, b"a", end=True)) == [
        ("reset", 1, "PROTOCOL_ERROR"),
        *answer_of(3, b"a"),
    ]


@pytest.mark.parametrize(
    "opening",
    [b"GET / HTTP/1.1\r\n\r\n", b"PRX", http2.PREFACE + raw(http2.PING, 0, 0, bytes(8)), http2.PREFACE + raw(4, 1, 0)],
    ids=["HTTP/1.1", "wrong from the third byte", "PING first", "an acknowledgement first"],
)
def test_what_does_not_begin_as_http2_is_refused(opening: bytes) -> None:
    assert Peer(greet=False).fault(opening) is ErrorCode.PROTOCOL_ERROR


def test_unknown_frames_and_settings_are_ignored() -> None:
    peer = Peer()
    assert peer.reply(raw(0xBB, 0xFF, 77, b"abc"), raw(http2.SETTINGS, 0, 0, b"\x99\x99\0\0\0\1")) == [
        ("settings", True)
    ]


# --- abuse ---------------------------------------------------------------------------------------------------------


def test_streams_over_the_limit_are_refused() -> None:
    peer = Peer(limits=Http2Limits(max_concurrent_streams=1, most_streams=2))
    assert peer.reply(peer.headers(1), peer.headers(3), peer.headers(5)) == [("reset", 5, "REFUSED_STREAM")]
    peer.send(peer.reset(1))
    assert peer.reply(peer.headers(7), peer.messages(7, b"a", end=True)) == answer_of(7, b"a")


def rapid_reset(peer: Peer, streams: range) -> list[object]:
    replies: list[object] = []
    for stream_id in streams:
        replies += peer.reply(peer.headers(stream_id), peer.reset(stream_id))
    return replies


def test_rapid_resets_retire_the_connection_without_harm_to_streams_in_flight() -> None:
    peer = Peer(limits=Http2Limits(resets=10, resets_per_second=0, streams_after_goaway=20))
    peer.send(peer.headers(1))
    assert rapid_reset(peer, range(3, 23, 2)) == []
    assert rapid_reset(peer, range(23, 25, 2)) == [("goaway", 23, "ENHANCE_YOUR_CALM")]
    assert (
        peer.reply(peer.headers(25), peer.messages(25, b"a")) == []
    )  # opened too late: another connection will serve it
    assert peer.reply(peer.messages(1, b"a", end=True)) == answer_of(1, b"a")
    assert len(peer.calls) == 12
    assert peer.fault(*(peer.headers(stream_id) for stream_id in range(27, 127, 2))) is ErrorCode.ENHANCE_YOUR_CALM


def test_resets_that_the_peer_makes_us_send_count_as_its_own() -> None:
    peer = Peer(limits=Http2Limits(resets=10, resets_per_second=0))
    replies: list[object] = []
    for stream_id in range(1, 23, 2):
        replies += peer.reply(peer.headers(stream_id), peer.window(stream_id, 0))
    assert replies == [
        *(("reset", stream_id, "PROTOCOL_ERROR") for stream_id in range(1, 23, 2)),
        ("goaway", 21, "ENHANCE_YOUR_CALM"),
    ]


def test_cancelled_streams_are_no_abuse_when_time_passes_or_work_is_done() -> None:
    peer = Peer(limits=Http2Limits(resets=10, resets_per_second=10))
    for first in range(1, 1001, 20):
        assert rapid_reset(peer, range(first, first + 20, 2)) == []
        peer.clock.now += 1.0
    peer = Peer(limits=Http2Limits(resets=10, resets_per_second=0))
    for stream_id in range(1, 1001, 4):  # answered, then cancelled by the client; the next one before its answer
        peer.send(peer.headers(stream_id), peer.messages(stream_id, b"a"), peer.reset(stream_id))
        assert rapid_reset(peer, range(stream_id + 2, stream_id + 4, 2)) == []


def test_all_streams_of_an_envoy_may_be_cancelled_at_once_and_again() -> None:
    limits = Http2Limits()
    peer = Peer(limits=limits)
    for first in (1, 2 * limits.most_streams + 1):
        ids = range(first, first + 2 * limits.most_streams, 2)
        assert peer.reply(*map(peer.headers, ids)) == []
        assert peer.reply(*map(peer.reset, ids)) == []
    assert not peer.session.retiring


@pytest.mark.parametrize(
    "frame",
    [
        raw(http2.PING, 0, 0, bytes(8)),
        raw(http2.PING, http2.ACK, 0, bytes(8)),
        raw(http2.SETTINGS, 0, 0),
        raw(http2.SETTINGS, http2.ACK, 0),
        raw(http2.PRIORITY, 0, 1, bytes(5)),
        raw(http2.DATA, 0, 1),
        raw(http2.DATA, http2.PADDED, 1, b"\0"),
        raw(http2.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
        raw(http2.GOAWAY, 0, 0, bytes(8)),
        raw(0xBB, 0, 0),
    ],
    ids=["ping", "pong", "settings", "ack", "priority", "empty data", "padding", "window", "goaway", "unknown"],
)
def test_floods_of_frames_without_content_end_the_connection(frame: bytes) -> None:
    peer = Peer(limits=Http2Limits(idle_frames=100, idle_frames_per_second=1))
    peer.send(peer.headers(1))
    peer.send(frame * 90)
    peer.clock.now += 60.0
    peer.send(frame * 60)
    assert peer.fault(frame * 60) is ErrorCode.ENHANCE_YOUR_CALM


def test_resets_and_trailers_of_ended_streams_are_a_flood_too() -> None:
    for frame in (raw(http2.RST_STREAM, 0, 1, bytes(4)), raw(http2.HEADERS, 5, 1, b"\x83")):
        peer = Peer(limits=Http2Limits(idle_frames=100, idle_frames_per_second=1))
        peer.send(peer.headers(1), peer.reset(1))
        assert peer.fault(frame * 200) is ErrorCode.ENHANCE_YOUR_CALM


def test_one_settings_frame_with_many_values_counts_as_many() -> None:
    peer = Peer(limits=Http2Limits(idle_frames=1000, idle_frames_per_second=1))
    assert peer.fault(raw(http2.SETTINGS, 0, 0, b"\0\4\0\0\0\1" * 2000)) is ErrorCode.ENHANCE_YOUR_CALM


def test_answers_earn_window_updates() -> None:
    peer = Peer(limits=Http2Limits(idle_frames=100, idle_frames_per_second=0))
    for stream_id in range(1, 401, 2):
        peer.send(
            peer.headers(stream_id),
            peer.messages(stream_id, b"a"),
            *([peer.window(stream_id, 1)] * 10),
            peer.reset(stream_id),
        )


def test_a_header_block_without_end_is_cut_off() -> None:
    peer = Peer()
    start = HeadersFrame(1, data=peer.block()).serialize()
    assert peer.fault(start, *([peer.continuation(1, b"", end=False)] * 9)) is ErrorCode.ENHANCE_YOUR_CALM
    peer = Peer()
    start = HeadersFrame(1, data=peer.block()).serialize()
    assert peer.fault(start, peer.continuation(1, bytes(16_384), end=False)) is ErrorCode.ENHANCE_YOUR_CALM


def test_a_header_list_over_the_limit_ends_the_connection() -> None:
    peer = Peer()
    assert peer.fault(peer.headers(1, *((f"x-{n}", "v" * 50) for n in range(250)))) is ErrorCode.ENHANCE_YOUR_CALM


def test_a_read_that_opens_many_streams_is_handled_in_turns() -> None:
    peer = Peer(limits=Http2Limits(streams_per_turn=4))
    peer.session.receive(b"".join(map(peer.headers, range(1, 21, 2))))
    assert (len(peer.calls), peer.session.has_more) == (4, True)
    peer.session.receive(b"")
    assert (len(peer.calls), peer.session.has_more) == (8, True)
    peer.session.receive(b"")
    assert (len(peer.calls), peer.session.has_more) == (10, False)


def test_a_read_that_takes_long_is_handled_in_turns_of_time() -> None:
    peer = Peer(limits=Http2Limits(turn_seconds=0.002))
    peer.session.receive(peer.headers(1))
    serve = peer.calls[0].message

    def slow(data: bytes) -> None:
        serve(data)
        peer.clock.now += 0.001 / FRAMES_PER_LOOK

    peer.calls[0].message = slow  # type: ignore[method-assign]
    peer.session.receive(b"".join(peer.messages(1, b"x") for _ in range(5 * FRAMES_PER_LOOK)))
    assert (len(peer.calls[0].messages), peer.session.has_more) == (2 * FRAMES_PER_LOOK, True)
    peer.session.receive(b"")
    assert (len(peer.calls[0].messages), peer.session.has_more) == (4 * FRAMES_PER_LOOK, True)
    peer.session.receive(b"")
    assert (len(peer.calls[0].messages), peer.session.has_more) == (5 * FRAMES_PER_LOOK, False)


# --- goodbye -------------------------------------------------------------------------------------------------------


def test_a_drain_serves_what_the_peer_opened_before_it_knew() -> None:
    peer = Peer()
    peer.send(peer.headers(1))
    peer.session.announce_drain()
    assert [peer.in_short(frame) for frame in peer.answers()] == [
        ("goaway", http2.LAST_STREAM_ID, "NO_ERROR"),
        ("ping", b"kvmdrain", False),
    ]
    assert peer.reply(peer.headers(3), raw(http2.PING, http2.ACK, 0, b"kvmdrain")) == [("goaway", 3, "NO_ERROR")]
    assert peer.reply(peer.headers(5), peer.messages(5, b"a", end=True)) == []
    assert peer.reply(peer.messages(3, b"a", end=True)) == answer_of(3, b"a")
    assert list(peer.session.streams) == [1]

"""The way out: never more than the peer's windows allow, nothing lost, streams in turn."""

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.frames import ErrorCode, Http2ConnectionError, Http2StreamError
from extproc.http2.limits import Allowance
from extproc.http2.outbound import Outbound, SendQueue


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def frames(outbound: Outbound) -> list[tuple[int, bytes]]:
    """Take the DATA frames: stream and content. Ends are single bytes between them."""
    data = b"".join(outbound.frames)
    outbound.frames.clear()
    found = []
    while data:
        high, low, kind, _, stream_id = struct.unpack_from(">BHBBL", data)
        size = high << 16 | low
        assert kind == 0
        found.append((stream_id, data[9 : 9 + size]))
        data = data[9 + size :]
    return found


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def end_frame(stream_id: int) -> bytes:
    return struct.pack(">BHBBL", 0, 3, 0, 1, stream_id) + b"end"


def make(window: int | None = None) -> tuple[Outbound, Clock]:
    clock = Clock()
    outbound = Outbound(clock=clock, flush=lambda: None)
    if window is not None:
        outbound.take_settings(initial_window=window, max_frame=None)
    return outbound, clock


def test_a_message_that_fits_is_one_frame_at_once() -> None:
    outbound, _ = make()
    queue = SendQueue(1)
    outbound.message(queue, b"abc")
    outbound.end(queue, end_frame(1))
    assert outbound.finished == [1]
    assert frames(outbound) == [(1, framed(b"abc")), (1, b"end")]


@pytest.mark.parametrize("size", [0, 1, 16_374, 16_375, 40_000, 62_000, 70_000])
@pytest.mark.parametrize("window", [10_000, 65_535])
def test_a_message_in_two_parts_is_sent_as_one(size: int, window: int) -> None:
    outbound, _ = make(window)
    queue = SendQueue(1)
    outbound.message(queue, b"head", b"x" * size)
    found = frames(outbound)
    assert sum(len(part) for _, part in found) <= window
    outbound.widen(queue, 1 << 20)
    outbound.widen(None, 1 << 20)
    outbound.message(queue, b"next")
    found += frames(outbound)
    assert b"".join(part for _, part in found) == framed(b"head" + b"x" * size) + framed(b"next")
    assert max(len(part) for _, part in found) <= 16_384


def test_a_large_message_is_cut_to_the_peer_s_frame_size() -> None:
    outbound, _ = make()
    message = b"x" * 40_000
    outbound.message(SendQueue(1), message)
    found = frames(outbound)
    assert [len(part) for _, part in found] == [16_384, 16_384, 40_005 - 32_768]
    assert b"".join(part for _, part in found) == framed(message)
    outbound.take_settings(initial_window=None, max_frame=1 << 24)
    outbound.widen(None, 1 << 20)
    outbound.message(SendQueue(3), message[:20_000])
    assert [len(part) for _, part in frames(outbound)] == [20_005]


def test_an_end_waits_behind_its_stream_s_bytes() -> None:
    outbound, _ = make(window=4)
    queue = SendQueue(1)
    outbound.message(queue, b"abc")
    outbound.end(queue, end_frame(1))
    assert outbound.finished == []
    assert frames(outbound) == [(1, framed(b"abc")[:4])]
    outbound.widen(queue, 4)
    assert frames(outbound) == [(1, framed(b"abc")[4:]), (1, b"end")]
    assert outbound.finished == [1]


def test_streams_take_turns_when_the_connection_s_window_opens() -> None:
    outbound, _ = make(window=1 << 20)
    first, second, third = SendQueue(1), SendQueue(3), SendQueue(5)
    outbound.message(first, b"x" * 65_530)  # takes all of the connection's window
    frames(outbound)
    outbound.message(first, b"a" * 40_000)
    outbound.message(second, b"b" * 20_000)
    outbound.message(third, b"c")
    assert frames(outbound) == []
    outbound.widen(None, 1 << 20)
    assert [stream for stream, _ in frames(outbound)] == [1, 3, 5, 1, 3, 1]


def test_a_stream_whose_window_is_shut_does_not_hold_up_others() -> None:
    outbound, _ = make(window=10)
    shut, free = SendQueue(1), SendQueue(3)
    outbound.message(shut, b"x" * 20)
    outbound.message(free, b"abc")
    assert frames(outbound) == [(1, framed(b"x" * 20)[:10]), (3, framed(b"abc"))]


def test_a_smaller_initial_window_makes_windows_negative_and_they_recover() -> None:
    outbound, _ = make(window=100)
    queue = SendQueue(1)
    outbound.message(queue, b"x" * 85)  # 90 of 100
    frames(outbound)
    outbound.take_settings(initial_window=50, max_frame=None)  # -40
    outbound.message(queue, b"yyy")
    outbound.widen(queue, 40)  # 0
    assert frames(outbound) == []
    outbound.widen(queue, 2)
    assert frames(outbound) == [(1, framed(b"yyy")[:2])]
    outbound.take_settings(initial_window=100, max_frame=None)
    assert frames(outbound) == [(1, framed(b"yyy")[2:])]


def test_nothing_is_sent_while_the_transport_is_full() -> None:
    outbound, _ = make()
    outbound.paused = True
    outbound.message(SendQueue(1), b"abc")
    assert (frames(outbound), outbound.can_send) == ([], False)
    outbound.paused = False
    assert outbound.can_send
    outbound.send_waiting()
    assert frames(outbound) == [(1, framed(b"abc"))]


def test_windows_that_grow_by_nothing_or_too_far_are_errors() -> None:
    outbound, _ = make()
    for queue, increment, code in [
        (None, 0, ErrorCode.PROTOCOL_ERROR),
        (None, (1 << 31) - 1, ErrorCode.FLOW_CONTROL_ERROR),
    ]:
        with pytest.raises(Http2ConnectionError) as refused:
            outbound.widen(queue, increment)
        assert refused.value.code is code
    for increment, code in [(0, ErrorCode.PROTOCOL_ERROR), ((1 << 31) - 1, ErrorCode.FLOW_CONTROL_ERROR)]:
        with pytest.raises(Http2StreamError) as reset:
            outbound.widen(SendQueue(1), increment)
        assert reset.value.code is code


def test_queues_that_move_are_not_stalled() -> None:
    outbound, clock = make(window=10)
    stuck, moving, dropped = SendQueue(1), SendQueue(3), SendQueue(5)
    for queue in (stuck, moving, dropped):
        outbound.message(queue, b"x" * 20)
    outbound.drop(dropped)
    clock.now = 5.0
    outbound.widen(moving, 1)
    assert (outbound.stalled(before=0.0), outbound.stalled(before=5.0)) == ([], [1])


messages = st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=300)), max_size=20)
widenings = st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 400)), max_size=40)


@pytest.mark.thorough
@given(messages, widenings, st.lists(st.integers(0, 500), max_size=5))
def test_whatever_the_windows_do_nothing_is_lost_and_no_window_is_passed(
    messages: list[tuple[int, bytes]], widenings: list[tuple[int, int]], initial: Iterable[int]
) -> None:
    outbound, _ = make(window=100)
    queues = [SendQueue(2 * number + 1) for number in range(4)]
    allowed = {queue.stream_id: 100 for queue in queues}
    sent: dict[int, bytes] = {queue.stream_id: b"" for queue in queues}
    wanted: dict[int, bytes] = {queue.stream_id: b"" for queue in queues}
    window = 100

    def take() -> None:
        for stream_id, part in frames(outbound):
            sent[stream_id] += part
            assert len(sent[stream_id]) <= allowed[stream_id]

    for index, message in messages:
        wanted[queues[index].stream_id] += framed(message)
        outbound.message(queues[index], message)
        take()
    for value in initial:
        for stream_id in allowed:
            allowed[stream_id] += value - window
        window = value
        outbound.take_settings(initial_window=value, max_frame=None)
        take()
    for index, increment in widenings:
        outbound.widen(None if index < 0 else queues[index], increment)
        if index >= 0:
            allowed[queues[index].stream_id] += increment
        take()
    outbound.widen(None, 1 << 20)
    for queue in queues:
        outbound.widen(queue, 1 << 20)
        allowed[queue.stream_id] += 1 << 20
    take()
    assert sent == wanted


def test_an_allowance_fills_with_time_and_with_work_up_to_its_capacity() -> None:
    allowance = Allowance(capacity=3, per_second=1, now=0.0)
    assert [allowance.spend(1, now=0.0) for _ in range(4)] == [True, True, True, False]
    assert [allowance.spend(1, now=2.0) for _ in range(2)] == [True, False]
    allowance.earn(100)
    assert [allowance.spend(1, now=2.0) for _ in range(4)] == [True, True, True, False]

"""HTTP/2 frames: what is written reads back as meant, and what no peer may send is refused by its code."""

import pytest
from hyperframe.frame import Frame, GoAwayFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame

from extproc.http2 import frames as http2
from extproc.http2.frames import ErrorCode, Http2ConnectionError, Setting


def parsed(data: bytes) -> Frame:
    frame, length = Frame.parse_frame_header(memoryview(data)[:9])
    assert length == len(data) - 9
    frame.parse_body(memoryview(data)[9:])
    return frame


def test_settings_read_back_with_another_library() -> None:
    frame = parsed(http2.settings_frame({Setting.MAX_CONCURRENT_STREAMS: 7, Setting.INITIAL_WINDOW_SIZE: 1 << 20}))
    assert isinstance(frame, SettingsFrame)
    assert (frame.stream_id, dict(frame.settings)) == (0, {3: 7, 4: 1 << 20})


def test_resets_windows_and_goodbyes_read_back_with_another_library() -> None:
    reset = parsed(http2.reset_frame(5, ErrorCode.REFUSED_STREAM))
    window = parsed(http2.window_frame(3, 1000))
    goaway = parsed(http2.goaway_frame(9, ErrorCode.ENHANCE_YOUR_CALM, "calm"))
    assert isinstance(reset, RstStreamFrame)
    assert isinstance(window, WindowUpdateFrame)
    assert isinstance(goaway, GoAwayFrame)
    assert (reset.stream_id, reset.error_code) == (5, 7)
    assert (window.stream_id, window.window_increment) == (3, 1000)
    assert (goaway.last_stream_id, goaway.error_code, goaway.additional_data) == (9, 11, b"calm")


def test_the_last_value_of_a_setting_counts() -> None:
    payload = http2.settings_frame({Setting.INITIAL_WINDOW_SIZE: 1})[9:]
    payload += http2.settings_frame({Setting.INITIAL_WINDOW_SIZE: 2, Setting.MAX_FRAME_SIZE: 1 << 14})[9:]
    assert http2.parse_settings(payload) == {4: 2, 5: 1 << 14}


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"12345", ErrorCode.FRAME_SIZE_ERROR),
        (b"\0\2\0\0\0\2", ErrorCode.PROTOCOL_ERROR),
        (b"\0\4\x80\0\0\0", ErrorCode.FLOW_CONTROL_ERROR),
        (b"\0\5\0\0\x3f\xff", ErrorCode.PROTOCOL_ERROR),
        (b"\0\5\1\0\0\0", ErrorCode.PROTOCOL_ERROR),
    ],
    ids=["length", "push", "window", "frame too small", "frame too large"],
)
def test_settings_that_no_peer_may_send_are_refused(payload: bytes, code: ErrorCode) -> None:
    with pytest.raises(Http2ConnectionError) as refused:
        http2.parse_settings(payload)
    assert refused.value.code is code


def test_padding_and_priority_are_taken_off() -> None:
    assert http2.unpadded(b"\2abc\0\0", http2.PADDED) == b"abc"
    assert http2.unpadded(b"\0", http2.PADDED) == b""
    assert http2.header_fragment(b"\1\0\0\0\0\x10abc\0", http2.PADDED | http2.HAS_PRIORITY) == b"abc"


@pytest.mark.parametrize(
    ("payload", "flags", "code"),
    [
        (b"", http2.PADDED, ErrorCode.FRAME_SIZE_ERROR),
        (b"\3ab", http2.PADDED, ErrorCode.PROTOCOL_ERROR),
        (b"abcd", http2.HAS_PRIORITY, ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_padding_and_priority_that_do_not_fit_are_refused(payload: bytes, flags: int, code: ErrorCode) -> None:
    with pytest.raises(Http2ConnectionError) as refused:
        http2.header_fragment(payload, flags)
    assert refused.value.code is code

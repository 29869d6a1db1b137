"""Multipart messages of the live and replay sockets."""

import pytest

from kv_indexer.events.sequence import Frame, is_replay_end, parse_live, parse_replay, replay_request

SEQ_7 = (7).to_bytes(8, "big")
END = b"\xff" * 8


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"", SEQ_7, b"x"], Frame(seq=7, payload=b"x")),
        ([b"kv@pod", SEQ_7, b"x"], Frame(seq=7, payload=b"x")),
        ([b"kv", b"more", SEQ_7, b"x"], Frame(seq=7, payload=b"x")),
        ([b"", b"\0\0\7", b"x"], None),
        ([SEQ_7, b"x"], None),
        ([b"x"], None),
        ([b"", END, b""], None),
    ],
)
def test_a_live_message_is_read_from_the_right(parts: list[bytes], expected: Frame | None) -> None:
    assert parse_live(parts) == expected


@pytest.mark.parametrize("topic", [[], [b""], [b"kv@pod"]])
def test_replay_answers_and_end_markers_have_three_or_four_frames(topic: list[bytes]) -> None:
    answer, end = [b"", *topic, SEQ_7, b"x"], [b"", *topic, END, b""]

    assert (parse_replay(answer), is_replay_end(answer), is_replay_end(end)) == (
        Frame(seq=7, payload=b"x"),
        False,
        True,
    )


def test_a_replay_answer_with_a_short_number_is_none() -> None:
    assert parse_replay([b"", b"\1", b"x"]) is None
    assert parse_replay([b"x"]) is None


def test_a_replay_request_is_an_empty_frame_and_the_first_number() -> None:
    assert replay_request(258) == [b"", b"\0\0\0\0\0\0\1\2"]

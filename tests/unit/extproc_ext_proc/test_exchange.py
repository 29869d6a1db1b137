"""One ext_proc stream as a state machine: what is answered when, in each body mode."""

from typing import Any

import msgspec
import pytest

from extproc.answers.response_plan import ResponseHandling, ResponsePlan
from extproc.errors import BadUpgradeError, BodyInPiecesError, BodyTooLargeError
from extproc.ext_proc.exchange import (
    BODY_CHUNK_BYTES,
    PIECES_OF_ANY_BODY,
    Answer,
    AskForResponse,
    BodyChunk,
    BodyMode,
    BodyWithPick,
    ChangedResponse,
    Exchange,
    HeadersWithPick,
    OutOfOrderError,
    Pick,
    RequestFacts,
    SetResponseHeaders,
)

FACTS = RequestFacts(method="POST", path="/v1/completions", objective=None, request_id="r1")
PODS = ("10.0.0.1:8000", "10.0.0.2:8000")


def opened(mode: BodyMode, *, end_of_stream: bool = False, max_body_bytes: int = 1000) -> tuple[Exchange, list[object]]:
    exchange = Exchange(max_body_bytes=max_body_bytes)
    steps = exchange.request_headers(FACTS, mode=mode, response_mode=BodyMode.NONE, end_of_stream=end_of_stream)
    return exchange, list(steps)


def test_duplex_holds_every_answer_until_the_body_has_ended() -> None:
    exchange, first = opened(BodyMode.FULL_DUPLEX_STREAMED)
    steps = [
        first,
        list(exchange.request_body(b"ab", end_of_stream=False)),
        list(exchange.request_body(b"cd", end_of_stream=False)),
        list(exchange.request_body(b"", end_of_stream=True)),
        list(exchange.picked(PODS)),
    ]
    assert steps == [
        [],
        [],
        [],
        [Pick(FACTS, b"abcd")],
        [HeadersWithPick(PODS), BodyChunk(b"abcd", end_of_stream=True)],
    ]


def test_duplex_body_ended_by_trailers_is_sent_on_without_end_and_with_trailers() -> None:
    exchange, _ = opened(BodyMode.FULL_DUPLEX_STREAMED)
    exchange.request_body(b"ab", end_of_stream=False)
    assert list(exchange.request_trailers()) == [Pick(FACTS, b"ab")]
    assert list(exchange.picked(PODS)) == [
        HeadersWithPick(PODS),
        BodyChunk(b"ab", end_of_stream=False),
        Answer.REQUEST_TRAILERS,
    ]


def test_duplex_body_is_sent_on_in_chunks_that_add_up_to_it() -> None:
    body = bytes(range(256)) * 700
    exchange, _ = opened(BodyMode.FULL_DUPLEX_STREAMED, max_body_bytes=len(body))
    exchange.request_body(body, end_of_stream=True)
    chunks = [step for step in exchange.picked(PODS) if isinstance(step, BodyChunk)]
    assert b"".join(chunk.body for chunk in chunks) == body
    assert max(len(chunk.body) for chunk in chunks) == BODY_CHUNK_BYTES
    assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_duplex_empty_body_is_sent_on_as_one_empty_chunk() -> None:
    exchange, _ = opened(BodyMode.FULL_DUPLEX_STREAMED)
    assert list(exchange.request_body(b"", end_of_stream=True)) == [Pick(FACTS, b"")]
    assert list(exchange.picked(PODS)) == [HeadersWithPick(PODS), BodyChunk(b"", end_of_stream=True)]


def test_buffered_answers_the_headers_at_once_and_the_body_with_the_pick() -> None:
    exchange, first = opened(BodyMode.BUFFERED)
    assert first == [Answer.REQUEST_HEADERS]
    assert list(exchange.request_body(b"ab", end_of_stream=True)) == [Pick(FACTS, b"ab")]
    assert list(exchange.picked(PODS)) == [BodyWithPick(PODS)]


def test_buffered_body_followed_by_trailers_is_picked_at_the_body() -> None:
    exchange, _ = opened(BodyMode.BUFFERED)
    assert list(exchange.request_body(b"ab", end_of_stream=False)) == [Pick(FACTS, b"ab")]
    exchange.picked(PODS)
    assert list(exchange.request_trailers()) == [Answer.REQUEST_TRAILERS]


@pytest.mark.parametrize("mode", list(BodyMode))
def test_a_request_without_body_is_picked_at_its_headers(mode: BodyMode) -> None:
    exchange, first = opened(mode, end_of_stream=True)
    assert first == [Pick(FACTS, b"")]
    assert list(exchange.picked(PODS)) == [HeadersWithPick(PODS)]


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL])
def test_a_body_that_cannot_be_seen_whole_is_picked_at_the_headers_and_passes(mode: BodyMode) -> None:
    exchange, first = opened(mode)
    assert first == [Pick(FACTS, None)]
    exchange.picked(PODS)
    assert list(exchange.request_body(b"ab", end_of_stream=True)) == [Answer.REQUEST_BODY]


def test_a_second_request_on_one_stream_does_not_pick_again() -> None:
    exchange, _ = opened(BodyMode.BUFFERED)
    again = exchange.request_headers(FACTS, mode=BodyMode.NONE, response_mode=BodyMode.NONE, end_of_stream=True)
    assert list(again) == [Answer.REQUEST_HEADERS]


def test_the_body_limit_is_enforced_on_the_chunk_that_passes_it() -> None:
    exchange, _ = opened(BodyMode.FULL_DUPLEX_STREAMED, max_body_bytes=4)
    exchange.request_body(b"abcd", end_of_stream=False)
    with pytest.raises(BodyTooLargeError, match="larger than 4 bytes"):
        exchange.request_body(b"e", end_of_stream=False)


def test_an_upload_may_have_twice_as_many_bytes() -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    facts = msgspec.structs.replace(FACTS, path="/v1/audio/transcriptions", headers=headers)
    exchange = Exchange(max_body_bytes=4)
    mode = BodyMode.FULL_DUPLEX_STREAMED
    exchange.request_headers(facts, mode=mode, response_mode=BodyMode.NONE, end_of_stream=False)
    assert not exchange.request_body(b"abcdefgh", end_of_stream=False)
    with pytest.raises(BodyTooLargeError, match="larger than 8 bytes"):
        exchange.request_body(b"i", end_of_stream=False)


def test_a_body_in_pieces_of_a_few_bytes_is_refused_and_a_long_one_in_frames_is_not() -> None:
    exchange, _ = opened(BodyMode.FULL_DUPLEX_STREAMED, max_body_bytes=1 << 24)
    for _ in range(PIECES_OF_ANY_BODY):
        assert not exchange.request_body(b"four", end_of_stream=False)
    with pytest.raises(BodyInPiecesError):
        for _ in range(PIECES_OF_ANY_BODY):
            exchange.request_body(b"four", end_of_stream=False)
    exchange, _ = opened(BodyMode.FULL_DUPLEX_STREAMED, max_body_bytes=1 << 24)
    frame = bytes(range(256)) * 16
    for _ in range(4095):
        assert not exchange.request_body(frame, end_of_stream=False)
    assert list(exchange.request_body(frame, end_of_stream=True)) == [Pick(FACTS, frame * 4096)]


@pytest.mark.parametrize("end_of_stream", [True, False])
def test_a_body_before_the_headers_is_no_envoy_s(end_of_stream: bool) -> None:
    with pytest.raises(OutOfOrderError, match="a request body before its headers"):
        Exchange(max_body_bytes=10).request_body(b"ab", end_of_stream=end_of_stream)


def test_a_duplex_response_body_is_echoed() -> None:
    exchange = Exchange(max_body_bytes=10)
    exchange.request_headers(FACTS, mode=BodyMode.NONE, response_mode=BodyMode.FULL_DUPLEX_STREAMED, end_of_stream=True)
    assert list(exchange.response_body(b"sse", end_of_stream=False)) == [
        BodyChunk(b"sse", end_of_stream=False, response=True)
    ]


def test_any_other_response_body_is_acknowledged() -> None:
    exchange, _ = opened(BodyMode.BUFFERED)
    assert list(exchange.response_body(b"x", end_of_stream=True)) == [Answer.RESPONSE_BODY]


# --- bodies that change, responses that are wanted -------------------------------------------------------------------

PASS, READ, REWRITE = ResponseHandling.PASS, ResponseHandling.READ, ResponseHandling.REWRITE
PLAN = ResponsePlan(requested_model="gpt-x")


def picked(mode: BodyMode, *, response_mode: BodyMode = BodyMode.NONE, **pick: Any) -> tuple[Exchange, list[object]]:
    """An exchange whose body has ended and been picked, and the answers to that."""
    exchange = Exchange(max_body_bytes=1000)
    exchange.request_headers(FACTS, mode=mode, response_mode=response_mode, end_of_stream=False)
    exchange.request_body(b"ab", end_of_stream=True)
    return exchange, list(exchange.picked(PODS, **pick))


def test_a_changed_body_goes_in_place_of_the_clients() -> None:
    pick: dict[str, Any] = {"body": b"changed", "removed_headers": ("content-encoding",)}
    _, duplex = picked(BodyMode.FULL_DUPLEX_STREAMED, **pick)
    _, buffered = picked(BodyMode.BUFFERED, **pick)
    assert duplex == [HeadersWithPick(PODS, ("content-encoding",)), BodyChunk(b"changed", end_of_stream=True)]
    assert buffered == [BodyWithPick(PODS, ("content-encoding",), b"changed")]


def test_a_body_that_envoy_keeps_to_itself_is_not_changed() -> None:
    _, steps = picked(BodyMode.NONE, body=b"changed", removed_headers=("content-encoding",))
    assert steps == [HeadersWithPick(PODS)]


@pytest.mark.parametrize(
    ("mode", "response_mode", "noted"),
    [
        (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE, True),
        (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.STREAMED, False),
        (BodyMode.NONE, BodyMode.NONE, False),
    ],
)
def test_a_note_is_left_only_where_the_response_comes_on_another_stream(
    mode: BodyMode, response_mode: BodyMode, noted: bool
) -> None:
    _, steps = picked(mode, response_mode=response_mode, plan=PLAN)
    assert steps[0] == HeadersWithPick(PODS, note=PLAN if noted else None)


def test_a_plan_that_needs_no_body_leaves_no_note() -> None:
    _, steps = picked(BodyMode.FULL_DUPLEX_STREAMED, plan=ResponsePlan())
    assert steps[0] == HeadersWithPick(PODS)


@pytest.mark.parametrize(
    ("handling", "step"),
    [(PASS, Answer.RESPONSE_HEADERS), (READ, AskForResponse(changes=False)), (REWRITE, AskForResponse(changes=True))],
)
def test_a_response_is_asked_for_where_it_is_wanted(handling: ResponseHandling, step: object) -> None:
    buffered, _ = picked(BodyMode.BUFFERED)
    alone = Exchange(max_body_bytes=10)
    duplex, _ = picked(BodyMode.FULL_DUPLEX_STREAMED)
    assert [
        list(exchange.response_headers(handling, end_of_stream=False)) for exchange in (buffered, alone, duplex)
    ] == [
        [step],
        [step],
        [Answer.RESPONSE_HEADERS],
    ]
    assert [exchange.facts is None for exchange in (buffered, alone, duplex)] == [False, True, False]


def test_a_response_without_body_is_not_asked_for() -> None:
    exchange, _ = picked(BodyMode.BUFFERED)
    assert list(exchange.response_headers(REWRITE, end_of_stream=True)) == [Answer.RESPONSE_HEADERS]


@pytest.mark.parametrize("handling", [PASS, READ])
@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED])
def test_the_client_is_told_in_every_mode_with_the_answer_to_the_response_headers(
    mode: BodyMode, handling: ResponseHandling
) -> None:
    told = {"x-kvmesh-degraded": "cap-output"}
    exchange, _ = picked(mode)
    elsewhere = mode is BodyMode.FULL_DUPLEX_STREAMED  # the body comes to the second filter
    step = SetResponseHeaders(told) if handling is PASS or elsewhere else AskForResponse(changes=False, headers=told)
    assert list(exchange.response_headers(handling, end_of_stream=False, headers=told)) == [step]
    exchange, _ = picked(mode)
    assert list(exchange.response_headers(handling, end_of_stream=True, headers=told)) == [SetResponseHeaders(told)]


def test_request_headers_are_taken_away_also_where_the_body_is_not_seen() -> None:
    _, steps = picked(BodyMode.NONE, removed_headers=("x-prefiller-host-port",))
    assert steps == [HeadersWithPick(PODS, ("x-prefiller-host-port",))]


def test_a_part_of_a_response_is_answered_with_what_changed_in_it() -> None:
    exchange, _ = picked(BodyMode.BUFFERED)
    exchange.response_headers(REWRITE, end_of_stream=False)
    assert [
        list(exchange.response_body(b"ab", end_of_stream=False, changed=changed)) for changed in (b"ab", b"", b"x")
    ] == [[Answer.RESPONSE_BODY], [ChangedResponse(b"")], [ChangedResponse(b"x")]]


def test_a_duplex_response_body_is_sent_on_as_it_became_in_chunks() -> None:
    exchange, _ = picked(BodyMode.FULL_DUPLEX_STREAMED, response_mode=BodyMode.FULL_DUPLEX_STREAMED)
    exchange.response_headers(REWRITE, end_of_stream=False)
    large = b"y" * (BODY_CHUNK_BYTES + 1)
    assert [
        list(exchange.response_body(b"ab", end_of_stream=end, changed=changed))
        for changed, end in ((b"", False), (large, True), (b"", True))
    ] == [
        [],
        [
            BodyChunk(large[:-1], end_of_stream=False, response=True),
            BodyChunk(b"y", end_of_stream=True, response=True),
        ],
        [BodyChunk(b"", end_of_stream=True, response=True)],
    ]


def facts(method: str, path: str, **headers: str) -> RequestFacts:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestFacts(method=method, path=path, objective=None, request_id="r1", headers=named)


TWO_WAY = facts("GET", "/v1/realtime?model=m", upgrade="websocket")


def headers_of(found: RequestFacts, mode: BodyMode, *, end_of_stream: bool = False) -> tuple[Exchange, list[object]]:
    exchange = Exchange(max_body_bytes=4)
    steps = exchange.request_headers(found, mode=mode, response_mode=BodyMode.NONE, end_of_stream=end_of_stream)
    return exchange, list(steps)


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
def test_a_two_way_request_is_picked_at_its_headers_and_its_buffered_body_is_switched_off(mode: BodyMode) -> None:
    exchange, steps = headers_of(TWO_WAY, mode)
    assert steps == [Pick(TWO_WAY, None)]
    assert list(exchange.picked(PODS)) == [HeadersWithPick(PODS, without_body=True)]


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
def test_a_body_that_envoy_sends_on_by_itself_is_not_switched_off(mode: BodyMode) -> None:
    exchange, steps = headers_of(TWO_WAY, mode)
    assert steps == [Pick(TWO_WAY, None)]
    assert list(exchange.picked(PODS)) == [HeadersWithPick(PODS)]


def test_a_two_way_duplex_body_of_any_length_is_sent_back_chunk_by_chunk() -> None:
    exchange, steps = headers_of(TWO_WAY, BodyMode.FULL_DUPLEX_STREAMED)
    assert steps == [Pick(TWO_WAY, None)]
    assert list(exchange.picked(PODS)) == [HeadersWithPick(PODS)]
    assert list(exchange.request_body(b"abcdef", end_of_stream=False)) == [BodyChunk(b"abcdef", end_of_stream=False)]
    assert exchange.sends_back
    assert list(exchange.request_body(b"", end_of_stream=True)) == [BodyChunk(b"", end_of_stream=True)]
    assert not exchange.sends_back


def test_trailers_end_a_two_way_body() -> None:
    exchange, _ = headers_of(TWO_WAY, BodyMode.FULL_DUPLEX_STREAMED)
    exchange.picked(PODS)
    assert list(exchange.request_trailers()) == [Answer.REQUEST_TRAILERS]
    assert not exchange.sends_back


@pytest.mark.parametrize(
    ("found", "is_two_way"),
    [
        (facts("CONNECT", ""), True),
        (facts("GET", "/any", upgrade="other"), True),
        (facts("POST", "/v1/chat/completions", upgrade="TLS/1.2"), False),
        (facts("POST", "/vllm.grpc.engine.VllmEngine/Generate", content_type="application/grpc"), True),
        (facts("POST", "/Greeter/SayHello", content_type="application/grpc+proto"), True),
        (facts("POST", "/Greeter/SayHello", content_type="application/json"), False),
        # whoever calls JSON gRPC: its body is read, and fields that no client may set are removed
        (facts("POST", "/v1/completions", content_type="application/grpc"), False),
        (facts("POST", "/generate", content_type="application/grpc"), False),
    ],
)
def test_two_way_requests_are_known_by_their_headers(found: RequestFacts, is_two_way: bool) -> None:
    assert found.is_two_way is is_two_way
    _, steps = headers_of(found, BodyMode.BUFFERED)
    assert steps == [Pick(found, None) if is_two_way else Answer.REQUEST_HEADERS]


def test_a_two_way_request_without_body_is_like_any_other() -> None:
    _, steps = headers_of(TWO_WAY, BodyMode.BUFFERED, end_of_stream=True)
    assert steps == [Pick(TWO_WAY, b"")]


def test_a_websocket_that_begins_with_a_post_is_refused() -> None:
    with pytest.raises(BadUpgradeError):
        headers_of(facts("POST", "/v1/realtime", upgrade="WebSocket"), BodyMode.FULL_DUPLEX_STREAMED)

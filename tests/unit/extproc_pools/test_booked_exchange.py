"""One routed request: who is blamed, who holds the booking, what of the response is read, and what is missed."""

import gzip
import zlib
from dataclasses import dataclass, field
from typing import Any

import pytest

from extproc.answers.judgement import Judgement, Measured
from extproc.answers.promise import AnswerPromise, OpenPromise, Promise, TokenTargets
from extproc.answers.realised import Comparison, Usage
from extproc.answers.response_plan import PASS_PLAN, Prediction, ResponseHandling, ResponsePlan
from extproc.choosing.endpoint_health import Outcome
from extproc.ext_proc.answers import ResponseHead
from extproc.ledger.facts import Arrival, Ended, Read
from extproc.ledger.ledger import Ledger
from extproc.pods.inflight import Booking
from extproc.pools.booked_exchange import MOST_INFLATED_BYTES, BookedExchange, ReadResponse
from extproc.shared.quota import QuotaNote
from tests.unit.extproc_ledger.told_facts import AtOnce

PODS = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
PREDICTION = Prediction(model="m", endpoint=PODS[0], prompt_tokens=20, matched_tokens=16, best_matched_tokens=16)
USAGE = b'{"usage":{"prompt_tokens":20,"prompt_tokens_details":{"cached_tokens":16}}}'
RIGHT = Comparison(
    model="m",
    arm="",
    endpoint=PODS[0],
    prompt_tokens=20,
    predicted_tokens=16,
    realised_tokens=16,
    error_tokens=0,
    regret_tokens=0,
    prompt_error_tokens=0,
)


@dataclass
class Books:
    told: list[tuple[Any, ...]] = field(default_factory=list)
    streams: list[tuple[str, str]] = field(default_factory=list)
    ledger: Ledger = field(init=False)
    reading: dict[tuple[float, str], BookedExchange] = field(default_factory=dict)
    response_key: bytes = b""
    ended: list[Ended] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = AtOnce(listeners={Read: (self.read,), Ended: (self.ended.append,)})

    def knows(self, endpoint: str) -> bool:
        return endpoint in (*PODS, "10.0.0.4:8000")

    def rebook(self, booking: Booking, endpoint: str) -> Booking:
        self.told.append(("rebook", booking.endpoint, endpoint))
        return Booking(endpoint=endpoint, booked_at=booking.booked_at)

    def computes_itself(self, booking: Booking, uncached_tokens: int) -> Booking:
        raise AssertionError("no prompt is computed by another pod")

    def release_leg(self, booking: Booking) -> None:
        raise AssertionError("no prompt is computed by another pod")

    def endpoint_answered(self, endpoint: str, *, failed: bool) -> None:
        self.told.append(("failed" if failed else "well", endpoint))

    def stream_read(self, endpoint: str, outcome: Outcome, *, seconds: float) -> None:
        self.streams.append((endpoint, outcome))

    def clock(self) -> float:
        return 5.0

    def release(
        self,
        booking: Booking,
        *,
        status: int,
        unserved: bool,
        answered_at: float,
        is_watched: bool,
        generated: int | None,
    ) -> None:
        self.told.append(("release", booking.endpoint, status, *(["unserved"] if unserved else [])))
        self.learned = generated
        assert answered_at == (self.clock() if status else 0.0)

    def keeps(self, response_id: str, endpoint: str) -> None:
        self.told.append(("keeps", response_id, endpoint))

    def endpoint_full(self, endpoint: str) -> None:
        self.told.append(("full", endpoint))

    def generated(self, note: QuotaNote, tokens: int) -> None:
        self.told.append(("generated", note.tenant, tokens))

    def read(self, fact: Read) -> None:
        self.told += [("missed", why) for why in fact.missed]
        if fact.comparison is not None:
            self.told.append(("realised", fact.comparison))
        if (judged := fact.judged) is not None:
            self.told.append(("judged", judged.judgement, judged.asked, judged.served_by, judged.has_come))
            self.measured = judged.measured


def answered(*, served_by: str | None, status: int = 200, from_pod: bool = True) -> list[tuple[Any, ...]]:
    """What the books are told of an exchange that was answered so."""
    books = Books()
    booking = Booking(endpoint=PODS[0], booked_at=0.0)
    exchange = BookedExchange(books=books, endpoints=PODS, booking=booking)
    exchange.responded(status=status, served_by=served_by, from_pod=from_pod)
    exchange.finish()
    return books.told


def release(endpoint: str, status: int = 200, *more: str) -> tuple[Any, ...]:
    return ("release", endpoint, status, *more)


def test_the_chosen_pod_served() -> None:
    assert answered(served_by=PODS[0]) == [("well", PODS[0]), release(PODS[0])]


def test_without_envoys_word_the_chosen_pod_served() -> None:
    assert answered(served_by=None) == [("well", PODS[0]), release(PODS[0])]


def test_the_pods_before_the_one_that_served_have_failed() -> None:
    assert answered(served_by=PODS[2]) == [
        ("failed", PODS[0]),
        ("failed", PODS[1]),
        ("well", PODS[2]),
        ("rebook", PODS[0], PODS[2]),
        release(PODS[2]),
    ]


def test_a_pod_that_envoy_fell_back_to_serves_after_the_whole_list_has_failed() -> None:
    assert answered(served_by="10.0.0.4:8000") == [
        *(("failed", pod) for pod in PODS),
        ("well", "10.0.0.4:8000"),
        ("rebook", PODS[0], "10.0.0.4:8000"),
        release("10.0.0.4:8000"),
    ]


def test_a_stranger_takes_no_booking_and_proves_nothing() -> None:
    assert answered(served_by="192.0.2.1:80") == [release(PODS[0])]


@pytest.mark.parametrize(
    ("status", "verdict"),
    [(200, "well"), (404, "well"), (500, "failed"), (501, "well"), (503, "failed")],
)
def test_a_server_error_is_the_pods_failure_and_a_clients_error_is_not(status: int, verdict: str) -> None:
    assert answered(served_by=PODS[0], status=status) == [(verdict, PODS[0]), release(PODS[0], status)]


@pytest.mark.parametrize(("status", "content_type"), [(503, "application/json"), (429, "application/json"), (429, "")])
def test_a_503_or_429_that_is_the_pods_own_says_that_it_is_full(status: int, content_type: str) -> None:
    books = Books()
    exchange = BookedExchange(books=books, endpoints=PODS, booking=Booking(endpoint=PODS[0], booked_at=0.0))
    exchange.responded(status=status, served_by=PODS[0], from_pod=True, content_type=content_type)
    exchange.finish()
    assert books.told == [("full", PODS[0]), ("release", PODS[0], status, "unserved")]


def test_an_answer_of_envoys_own_is_the_failure_of_the_pod_that_it_tried_last() -> None:
    told = answered(served_by=PODS[1], status=503, from_pod=False)
    assert told == [
        *(("failed", pod) for pod in PODS[:2]),
        ("rebook", PODS[0], PODS[1]),
        release(PODS[1], 503, "unserved"),
    ]


def test_envoys_word_that_a_pod_took_too_long_says_that_the_pod_has_the_request() -> None:
    assert answered(served_by=PODS[0], status=504, from_pod=False) == [("failed", PODS[0]), release(PODS[0], 504)]


@pytest.mark.parametrize("status", [403, 413, 429])
def test_a_refusal_by_another_filter_of_envoys_blames_nobody(status: int) -> None:
    assert answered(served_by=None, status=status, from_pod=False) == [release(PODS[0], status, "unserved")]


def test_a_refusal_of_envoys_own_after_a_pod_was_chosen_says_nothing_of_that_pod() -> None:
    assert answered(served_by=PODS[0], status=429, from_pod=False) == [release(PODS[0], 429, "unserved")]


def test_a_second_answer_of_a_moved_exchange_goes_to_where_it_was_picked() -> None:
    books = Books()
    exchange = BookedExchange(books=books, endpoints=PODS, booking=Booking(endpoint=PODS[0], booked_at=0.0))
    for served_by in (PODS[1], PODS[0]):  # the booking is elsewhere when the first one answers
        exchange.responded(status=200, served_by=served_by, from_pod=True)
    assert books.told[3:] == [("well", PODS[0]), ("rebook", PODS[1], PODS[0])]


def test_an_exchange_that_ends_without_an_answer_blames_nobody() -> None:
    books = Books()
    BookedExchange(books=books, endpoints=PODS, booking=Booking(endpoint=PODS[0], booked_at=0.0)).finish()
    assert books.told == [("release", PODS[0], 0)]


# --- responses --------------------------------------------------------------------------------------------------------


def head(**changes: Any) -> ResponseHead:
    facts: dict[str, Any] = {
        "status": 200,
        "content_type": "application/json",
        "content_encoding": "",
        "content_length": len(USAGE),
    }
    return ResponseHead(**(facts | changes))


def read(
    plan: ResponsePlan, *chunks: bytes, served_by: str | None = PODS[0], ended: bool = True, **changes: Any
) -> tuple[ResponseHandling, bytes, list[tuple[Any, ...]]]:
    books = Books()
    response = ReadResponse(books=books, plan=plan)
    handling = response.begin(head(**changes), served_by=served_by)
    passed = b""
    if handling is not ResponseHandling.PASS:
        for i, chunk in enumerate(chunks):
            passed += response.chunk(chunk, end_of_stream=ended and i == len(chunks) - 1)
    response.finish()
    return handling, passed, books.told


SAMPLED = ResponsePlan(prediction=PREDICTION, sampled=True)
SMALL = ResponsePlan(prediction=PREDICTION, read_below_bytes=len(USAGE))
RENAMED = ResponsePlan(requested_model="gpt-x")


@pytest.mark.parametrize(
    ("plan", "wants"),
    [
        (PASS_PLAN, False),
        (ResponsePlan(prediction=PREDICTION), False),
        (ResponsePlan(sampled=True), False),
        (SAMPLED, True),
        (SMALL, True),
        (RENAMED, True),
        (ResponsePlan(watched=True), True),
    ],
)
def test_a_plan_that_needs_no_body_says_so(plan: ResponsePlan, wants: bool) -> None:
    assert plan.wants_body is wants


@pytest.mark.parametrize("plan", [SAMPLED, SMALL])
def test_usage_is_compared_with_the_prediction(plan: ResponsePlan) -> None:
    assert read(plan, USAGE[:9], USAGE[9:]) == (ResponseHandling.READ, USAGE, [("realised", RIGHT)])


@pytest.mark.parametrize(
    "changes",
    [{"content_length": len(USAGE) + 1}, {"content_length": None}, {"content_type": "text/event-stream"}],
    ids=["larger", "of unknown size", "stream"],
)
def test_only_small_documents_are_read_when_not_sampled(changes: dict[str, Any]) -> None:
    assert read(SMALL, USAGE, **changes) == (ResponseHandling.PASS, b"", [])


WATCHED = ResponsePlan(watched=True)
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("events", "ended", "verdict"),
    [
        ([TOKEN, DONE], True, "good"),
        ([TOKEN], False, "neither"),  # the client may have left
        ([b": here\n\n"], False, "broken"),  # broken off right after its headers
        ([DONE], True, "failed"),
        (
            [b'data: {"error":{"message":"no","type":"InternalServerError","code":500}}\n\n', DONE],
            True,
            "failed",
        ),
        ([TOKEN, b'data: {"error":{"message":"no","code":null}}\n\n', DONE], True, "failed"),
        ([b'data: {"error":{"message":"too long","code":400}}\n\n', DONE], True, "neither"),  # the client's own
        ([b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'], True, "failed"),
        ([b'data: {"type":"response.failed","response":{"error":{"code":"x"}}}\n\n'], True, "failed"),
        ([b'data: {"error":"worker died"}\n\n'], True, "failed"),
        ([b'data: {"choices":[{"index":0,"delta":{"content":"an error"}}]}\n\n', DONE], True, "good"),
    ],
)
def test_a_watched_stream_tells_whether_the_pod_failed_behind_good_headers(
    events: list[bytes], ended: bool, verdict: str
) -> None:
    books = Books()
    response = ReadResponse(books=books, plan=WATCHED)
    assert response.begin(head(content_type="text/event-stream"), served_by=PODS[0]) is ResponseHandling.READ
    for i, event in enumerate(events):
        assert response.chunk(event, end_of_stream=ended and i == len(events) - 1) == event
    response.finish()
    assert (books.streams, books.told) == ([(PODS[0], verdict)], [])


def test_a_watched_document_passes() -> None:
    assert read(WATCHED, USAGE) == (ResponseHandling.PASS, b"", [])


def test_a_rewritten_response_is_compared_as_well() -> None:
    plan = ResponsePlan(requested_model="gpt-x", prediction=PREDICTION, sampled=True)
    content = b'{"model":"m",' + USAGE[1:]
    expected = b'{"model":"gpt-x",' + USAGE[1:]
    assert read(plan, content) == (ResponseHandling.REWRITE, expected, [("realised", RIGHT)])


@pytest.mark.parametrize("status", [0, 304, 400, 503])
def test_what_is_no_success_passes(status: int) -> None:
    assert read(RENAMED, USAGE, status=status) == (ResponseHandling.PASS, b"", [])


@pytest.mark.parametrize(
    ("plan", "content", "changes", "why"),
    [
        (RENAMED, USAGE, {"content_encoding": "gzip"}, "compressed"),
        (RENAMED, USAGE, {"content_type": "audio/wav"}, "other-content-type"),
        (SAMPLED, b'{"usage":{"prompt_tokens":20}}', {}, "no-cached-tokens"),
        (SAMPLED, b'{"choices":[]}', {}, "no-usage"),
        (SAMPLED, b"{" + b" " * (1 << 20) + USAGE[1:], {}, "too-large"),
        (SAMPLED, USAGE, {"served_by": PODS[1]}, "served-elsewhere"),
        (RENAMED, b'{"a":"' + b"y" * (5 << 20) + b'"', {"ended": False}, "too-large"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_counted(
    plan: ResponsePlan, content: bytes, changes: dict[str, Any], why: str
) -> None:
    assert read(plan, content, **changes)[2] == [("missed", why)]


def test_a_body_that_envoy_does_not_send_is_missed() -> None:
    assert read(SAMPLED)[2] == [("missed", "not-delivered")]


def test_a_response_that_broke_off_is_not_compared() -> None:
    assert read(SAMPLED, USAGE, ended=False)[2] == []


NOTE = QuotaNote("acme", "gpt-x", 100)
COUNTED = ResponsePlan(quota=NOTE)
DELTAS = b"".join(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n' for _ in range(3))


def test_what_a_response_of_a_limited_tenant_brings_is_counted() -> None:
    body = b'{"usage":{"prompt_tokens":9,"completion_tokens":7}}'
    handling, passed, told = read(COUNTED, body)
    assert (handling, passed, told) == (ResponseHandling.READ, body, [("generated", "acme", 7)])


def test_a_stream_without_usage_or_without_an_end_is_counted_by_its_events() -> None:
    for ended in (True, False):
        _, _, told = read(COUNTED, DELTAS, ended=ended, content_type="text/event-stream", content_length=None)
        assert told == [("generated", "acme", 3)]


def test_half_a_document_leaves_what_was_reserved() -> None:
    assert read(COUNTED, b'{"usage":{"comp', ended=False)[2] == []


STREAM: dict[str, Any] = {"content_type": "text/event-stream", "content_length": None}
START = b'data: {"type":"message_start","message":{"usage":{"input_tokens":10,"output_tokens":0}}}\n\n'
DELTA = b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"hi"}}\n\n'
END = b'data: {"type":"message_delta","delta":{},"usage":{"output_tokens":5}}\n\n'
LONG = b"data: " + b"x" * (2 << 20)


@pytest.mark.parametrize(
    ("chunks", "ended", "expected"),
    [
        ([START, DELTA * 7], False, 7),  # 0, says the beginning
        ([START, DELTA * 7], True, 7),  # a pod that broke off in good order
        ([START, DELTA * 7, END], True, 5),
        ([START, DELTA * 3, END], False, 5),
        ([LONG, b"\n\n", DELTA * 7], False, 100),  # who knows what was in it
        ([LONG, b"\n\n", DELTA * 7], True, 100),
        ([LONG, b"\n\n", DELTA * 107], False, 107),
        ([LONG, b"\n\n", DELTA * 7, END], True, 5),
    ],
    ids=[
        "broken off",
        "without a word",
        "whole",
        "nearly",
        "skipped",
        "skipped to the end",
        "more",
        "skipped but told",
    ],
)
def test_a_stream_counts_as_what_it_says_in_the_end_or_else_as_what_surely_came(
    chunks: list[bytes], ended: bool, expected: int
) -> None:
    assert read(COUNTED, *chunks, ended=ended, **STREAM)[2] == [("generated", "acme", expected)]


def test_a_long_document_counts_by_its_usage_and_without_one_stays_as_reserved() -> None:
    long = b'{"choices":[{"logprobs":"' + b"x" * (2 << 20) + b'"}]'
    usage = b',"usage":{"prompt_tokens":5,"completion_tokens":4000}}'
    assert read(COUNTED, long, usage)[2] == [("generated", "acme", 4000)]
    assert read(COUNTED, long, b"}")[2] == []


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "GZIP"])
def test_a_compressed_answer_is_unpacked_for_reading_and_passes_as_it_is(coding: str) -> None:
    packed = zlib.compress(USAGE) if coding == "deflate" else gzip.compress(USAGE)
    chunks = [packed[at : at + 5] for at in range(0, len(packed), 5)]
    assert read(SAMPLED, *chunks, content_encoding=coding) == (ResponseHandling.READ, packed, [("realised", RIGHT)])


@pytest.mark.parametrize("content", [b"no gzip at all", gzip.compress(b"0" * (MOST_INFLATED_BYTES + 1))])
def test_damage_and_bombs_are_not_read(content: bytes) -> None:
    expected = (ResponseHandling.READ, content + USAGE, [("missed", "compressed")])
    assert read(SAMPLED, content, USAGE, content_encoding="gzip") == expected


def test_a_last_event_without_its_end_counts() -> None:
    events = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}'
    assert read(COUNTED, events, content_type="text/event-stream")[2] == [("generated", "acme", 7)]


async def test_who_observes_hears_what_the_pod_reports_as_soon_as_the_response_is_whole() -> None:
    exchange = BookedExchange(books=Books(), endpoints=PODS, booking=None)
    response = ReadResponse(books=Books(), plan=ResponsePlan(prediction=PREDICTION, sampled=True), exchange=exchange)
    head = ResponseHead(status=200, content_type="application/json", content_encoding="", content_length=len(USAGE))
    assert response.begin(head, served_by=PODS[0]) is ResponseHandling.READ
    response.chunk(USAGE[:20], end_of_stream=False)
    assert exchange.usage is None
    response.chunk(USAGE[20:], end_of_stream=True)
    assert exchange.usage == Usage(prompt_tokens=20, cached_tokens=16)


# --- promises ---------------------------------------------------------------------------------------------------------

TARGETS = TokenTargets(ttft_seconds=2.0, inter_token_seconds=0.1)
PROMISE = Promise(class_name="standard", tenant="none", model="m", targets=TARGETS)
TOKEN, TOLD = (
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":21}}\n\n',
)
ANSWER = b'{"choices":[{}],"usage":{"prompt_tokens":1,"completion_tokens":11}}'
MET, LATE = Judgement(ttft=True, inter_token=True, whole=True), Judgement(ttft=False, inter_token=True, whole=False)


class Wall:
    """Unix time."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def time(self) -> float:
        return self.now


def judged(
    wall: Wall,
    *chunks: tuple[float, bytes],
    ended: bool = True,
    left_at: float | None = None,
    asked: TokenTargets | None = None,
    measured: bool = False,
    **changes: Any,
) -> list[Any]:
    """What the books are told of a response whose chunks come so many seconds after the request."""
    books = Books()
    promise = AnswerPromise(promise=PROMISE, asked=asked, arrived_at=wall.now, endpoint=PODS[0])
    response = ReadResponse(books=books, plan=ResponsePlan(promise=promise, sampled=True))
    changes.setdefault("content_type", "text/event-stream")
    assert response.begin(head(**changes), served_by=PODS[1]) is ResponseHandling.READ
    began = wall.now
    for i, (seconds, chunk) in enumerate(chunks):
        wall.now = began + seconds
        assert response.chunk(chunk, end_of_stream=ended and i == len(chunks) - 1) == chunk
    if left_at is not None:
        wall.now = began + left_at
    response.finish()
    return [*books.told, *([books.measured] if measured else [])]


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    wall = Wall()
    monkeypatch.setattr("extproc.pools.booked_exchange.time", wall)
    return wall


def test_a_stream_is_judged_by_its_first_token_and_the_mean_of_the_others(wall: Wall) -> None:
    assert judged(wall, (1.9, TOKEN), (3.7, TOKEN + TOLD)) == [("judged", MET, None, PODS[1], True)]
    assert judged(wall, (2.1, TOKEN), (3.9, TOKEN + TOLD)) == [("judged", LATE, None, PODS[1], True)]


@pytest.mark.parametrize(("content_type", "found"), [("text/event-stream", 1.9), ("application/json", None)])
async def test_who_observes_hears_when_the_first_token_of_a_stream_came(
    wall: Wall, content_type: str, found: float | None
) -> None:
    exchange = BookedExchange(books=Books(), endpoints=PODS, booking=None)
    promise = AnswerPromise(promise=PROMISE, asked=None, arrived_at=wall.now, endpoint=PODS[0])
    response = ReadResponse(books=Books(), plan=ResponsePlan(promise=promise, sampled=True), exchange=exchange)
    response.begin(head(content_type=content_type), served_by=PODS[0])
    for seconds in (1.9, 1.0):
        wall.now += seconds
        response.chunk(TOKEN, end_of_stream=False)
    assert exchange.first_token_seconds == (None if found is None else pytest.approx(found))


def test_what_comes_before_the_first_token_is_none(wall: Wall) -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    assert judged(wall, (0.1, role), (2.1, TOKEN), (2.15, TOKEN)) == [("judged", LATE, None, PODS[1], True)]


def test_what_comes_after_the_last_token_takes_no_time_of_it(wall: Wall) -> None:
    chunks = (1.9, TOKEN), (1.95, TOKEN), (9.0, b": still here\n\n"), (9.5, b"data: [DONE]\n\n")
    assert judged(wall, *chunks) == [("judged", MET, None, PODS[1], True)]


def test_the_events_are_counted_where_the_stream_tells_no_usage(wall: Wall) -> None:
    slow = Judgement(ttft=True, inter_token=False, whole=False)
    assert judged(wall, (1.0, TOKEN), (1.3, TOKEN), (1.4, TOKEN)) == [("judged", slow, None, PODS[1], True)]


def test_what_the_request_asks_for_is_judged_besides(wall: Wall) -> None:
    asked = TokenTargets(ttft_seconds=1.0, inter_token_seconds=0.1)
    assert judged(wall, (1.9, TOKEN), (1.95, TOKEN), asked=asked) == [("judged", MET, LATE, PODS[1], True)]


def test_a_client_that_leaves_a_stream_is_told_with_what_came(wall: Wall) -> None:
    met = Judgement(ttft=True, whole=True)
    assert judged(wall, (1.0, TOKEN), ended=False, left_at=9.0) == [("judged", met, None, PODS[1], True)]
    late = Judgement(ttft=False, whole=False)
    assert judged(wall, left_at=9.0) == [("missed", "not-delivered"), ("judged", late, None, PODS[1], False)]


def test_an_answer_at_once_is_judged_as_a_whole(wall: Wall) -> None:
    json: dict[str, Any] = {"content_type": "application/json"}
    for seconds, met in ((2.9, True), (3.1, False)):
        assert judged(wall, (0.1, ANSWER[:9]), (seconds, ANSWER[9:]), **json) == [
            ("judged", Judgement(whole=met), None, PODS[1], True)
        ]
    assert judged(wall, (0.1, ANSWER[:9]), ended=False, left_at=9.0, **json) == []


def test_the_times_of_a_stream_are_told_as_far_as_they_were_seen(wall: Wall) -> None:
    *_, whole = judged(wall, (1.0, TOKEN), (1.5, TOKEN), (2.0, TOKEN), measured=True)
    assert whole == Measured(ttft_seconds=1.0, inter_token_seconds=0.5)
    *_, one = judged(wall, (1.0, TOKEN), ended=False, left_at=9.0, measured=True)
    assert one == Measured(ttft_seconds=1.0)
    *_, none = judged(wall, left_at=9.0, measured=True)  # how long it would have taken is not known
    assert none == Measured()
    json: dict[str, Any] = {"content_type": "application/json"}
    *_, document = judged(wall, (2.9, ANSWER), measured=True, **json)  # when its tokens were made was not seen
    assert document == Measured()


def test_several_answers_side_by_side_have_no_time_from_token_to_token(wall: Wall) -> None:
    second = TOKEN.replace(b'"index":0', b'"index":1')
    met = Judgement(ttft=True, whole=True)
    assert judged(wall, (1.0, TOKEN), (9.0, second)) == [("judged", met, None, PODS[1], True)]


def test_the_end_of_an_exchange_is_told_with_its_answer_and_its_targets() -> None:
    books = Books()
    booking = Booking(endpoint=PODS[0], booked_at=1.0)
    promise = OpenPromise(promise=PROMISE, arrived_at=0.0, is_stream=True)
    exchange = BookedExchange(
        books=books, endpoints=PODS, booking=booking, promise=promise, model="gpt-x", arm="m", arrival=Arrival(at=2.0)
    )
    exchange.responded(status=503, served_by=PODS[1], from_pod=True)
    exchange.finish()
    (ended,) = books.ended
    assert (ended.booked_on, ended.served_by, ended.status, ended.promise) == (PODS[1], PODS[1], 503, promise)
    assert (ended.label, ended.arm, ended.seconds, ended.seconds_to_headers) == ("gpt-x", "m", 3.0, 3.0)


@pytest.mark.parametrize(
    "events",
    [
        (TOKEN, b'data: {"error":{"message":"no","code":500}}\n\ndata: [DONE]\n\n'),
        (b"data: [DONE]\n\n",),
        (b": here\n\n",),
    ],
    ids=["an error event", "its end alone", "comments alone"],
)
def test_a_failed_stream_meets_no_target(wall: Wall, events: tuple[bytes, ...]) -> None:
    failed = Judgement(whole=False)
    assert judged(wall, *((1.0, event) for event in events)) == [("judged", failed, None, PODS[1], True)]


def test_a_stream_with_the_clients_own_error_is_not_judged(wall: Wall) -> None:
    refused = b'data: {"error":{"message":"too long","code":400}}\n\ndata: [DONE]\n\n'
    assert judged(wall, (1.0, refused)) == [("judged", Judgement(), None, PODS[1], True)]


def test_the_end_of_an_exchange_tells_a_failed_stream() -> None:
    books = Books()
    exchange = BookedExchange(books=books, endpoints=PODS, booking=Booking(endpoint=PODS[0], booked_at=1.0))
    response = ReadResponse(books=books, plan=WATCHED, exchange=exchange)
    response.begin(head(content_type="text/event-stream"), served_by=PODS[0])
    response.chunk(b'data: {"error":"worker died"}\n\n', end_of_stream=False)
    exchange.responded(status=200, served_by=PODS[0], from_pod=True)
    exchange.finish()
    assert [ended.stream_failed for ended in books.ended] == [True]

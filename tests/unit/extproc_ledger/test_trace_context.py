"""What is believed of a client's trace headers, and which traces are recorded."""

import pytest

from extproc.ledger.facts import SpanContext
from extproc.ledger.tracing import Parent, is_chosen, parse_traceparent, passed_on

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = Parent(trace_id=int(TRACE, 16), span_id=int(SPAN, 16), is_sampled=True)


def test_a_traceparent_is_read() -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-01") == PARENT


def test_a_parent_that_is_not_sampled_says_so() -> None:
    parent = parse_traceparent(f"00-{TRACE}-{SPAN}-00")
    assert parent is not None
    assert not parent.is_sampled


def test_a_later_version_with_more_fields_is_read_as_this_one() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-more") == PARENT


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "nonsense", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01-more", f"ff-{TRACE}-{SPAN}-01"),
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01"),
        *(f"00-{TRACE}-{SPAN}-0１", f" 00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01\n"),
    ],
)
def test_a_malformed_traceparent_is_none(text: str | None) -> None:
    assert parse_traceparent(text) is None


@pytest.mark.parametrize(
    ("tracestate", "kept"),
    [("a=1,b=2", "a=1,b=2"), (None, ""), ("", ""), ("a=" + "x" * 600, ""), ("a=1\r\nx-evil: 1", ""), ("a=é", "")],
)
def test_a_tracestate_is_passed_on_whole_or_not_at_all(tracestate: str | None, kept: str) -> None:
    assert passed_on(tracestate) == kept


def test_the_share_is_taken_of_the_ids_random_half() -> None:
    assert [is_chosen(half << 62, share=0.5) for half in (0, 1, 2, 3)] == [True, True, False, False]
    assert is_chosen((1 << 128) - 1, share=1.0)
    assert not is_chosen(0, share=0.0)


def test_the_pod_is_told_of_our_span() -> None:
    span = SpanContext(trace_id=int(TRACE, 16), span_id=1, parent_id=2)
    assert span.traceparent == f"00-{TRACE}-0000000000000001-01"

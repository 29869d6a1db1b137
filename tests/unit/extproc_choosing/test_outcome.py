"""What one request says about its pod: failure, full, the client's own fault."""

from typing import Any

import pytest

from extproc.choosing.endpoint_health import Outcome, Seen, outcome_of, outcome_of_headers

JSON = "application/json"


@pytest.mark.parametrize(
    ("status", "headers", "outcome"),
    [
        (200, {}, "good"),
        (429, {}, "full"),
        (503, {"content_type": JSON}, "full"),
        (503, {}, "failed"),
        (503, {"content_type": JSON, "from_pod": False}, "failed"),
        (429, {"from_pod": False}, "neither"),
        (500, {}, "failed"),
        (501, {}, "neither"),
        *((status, {}, "neither") for status in (400, 404, 413, 422)),
    ],
)
def test_a_status_tells_whether_the_pod_failed(status: int, headers: dict[str, Any], outcome: str) -> None:
    assert outcome_of_headers(status, **headers) == outcome


@pytest.mark.parametrize(
    ("seconds", "stood_still", "outcome"),
    [(0.9, True, "neither"), (1.0, True, "failed"), (1.0, None, "failed"), (60.0, False, "neither")],
)
def test_a_client_that_leaves_before_the_headers_blames_only_an_engine_that_did_nothing(
    seconds: float, stood_still: bool | None, outcome: str
) -> None:
    assert outcome_of(Seen(status=0, seconds=seconds, stood_still=stood_still)) == outcome


def test_an_unread_stream_is_good_only_where_the_engine_did_something() -> None:
    seen = {value: Seen(status=200, is_stream=True, answer_seconds=1.0, stood_still=value)
            for value in (False, None, True)}  # fmt: skip
    assert [outcome_of(each) for each in seen.values()] == [Outcome.GOOD, Outcome.UNPROVEN, Outcome.UNPROVEN]

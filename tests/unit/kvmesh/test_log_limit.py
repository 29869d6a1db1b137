"""No pod and no client can fill the log; how many lines were left out is told."""

import io
import logging

import pytest

from kvmesh.logs import LONGEST_TEXT, LeftOut, LimitedHandler, LineLimit


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def written(limit: LineLimit, subject: str, count: int, *, place: str = "p", now: float = 0.0) -> int:
    passed = 0
    for number in range(count):
        if limit.passes(place, subject, now=now):
            passed += 1
        else:
            limit.leave_out(place, subject, text=f"{subject} {number}")
    return passed


def test_a_subjects_lines_are_limited_and_others_are_not_hidden_by_them() -> None:
    limit = LineLimit(most_of_subject=3, window_seconds=60.0)
    assert [written(limit, "a", 1000), written(limit, "b", 2), written(limit, "a", 5, place="q")] == [3, 2, 3]
    assert limit.ended(now=59.9) == []
    assert limit.ended(now=60.0) == [
        LeftOut(place="p", subject="a", count=997, seconds=60.0, last="a 999"),
        LeftOut(place="q", subject="a", count=2, seconds=60.0, last="a 4"),
    ]
    assert limit.ended(now=1000.0) == []
    assert written(limit, "a", 10, now=1000.0) == 3


def test_a_place_is_limited_whatever_its_lines_are_about_and_holds_little_of_it() -> None:
    limit = LineLimit(most_of_subject=3, most_of_place=20, window_seconds=60.0)
    assert sum(written(limit, f"subject {number}", 1) for number in range(10_000)) == 20
    assert len(limit._subjects) == 20
    assert [(each.subject, each.count) for each in limit.ended(now=60.0)] == [("", 9980)]
    assert (limit._subjects, limit._places) == ({}, {})


@pytest.fixture
def logger() -> logging.Logger:
    logger = logging.Logger("kvmesh.test")
    logger.propagate = False
    return logger


def handler(logger: logging.Logger, clock: Clock) -> tuple[LimitedHandler, io.StringIO]:
    stream = io.StringIO()
    made = LimitedHandler(stream, limit=LineLimit(most_of_subject=2, window_seconds=60.0), clock=clock)
    logger.addHandler(made)
    return made, stream


def test_lines_are_limited_by_their_endpoint_or_their_first_text(logger: logging.Logger) -> None:
    clock = Clock()
    made, stream = handler(logger, clock)
    for number in range(5):
        for endpoint in ("a", "b"):
            logger.warning("endpoint: %d", number, extra={"endpoint": endpoint})
            logger.warning("batch %d of %s", number, f"{endpoint}:1#{number}")
        logger.warning("nobody: %s", ValueError(number))
        logger.debug("seen by who looks closely: %d", number)
    lines = stream.getvalue().splitlines()
    assert [sum(word in line for line in lines) for word in ("endpoint", "batch", "nobody", "closely")] == [4, 4, 2, 5]

    stream.truncate(0)
    clock.now += 61
    logger.warning("nobody: %s", "anew")
    made.close()
    told = stream.getvalue()
    assert told.count("3 more lines like this were left out in 60 s: ") == 5
    assert "endpoint: 4" in told
    assert told.count("anew") == 1


def test_what_was_left_out_is_told_at_the_end_and_by_itself(logger: logging.Logger) -> None:
    clock = Clock()
    made, stream = handler(logger, clock)
    for _ in range(5):
        logger.warning("nobody")
    assert made._timer is not None
    clock.now += 61
    made._timer.function()
    assert "3 more lines like this" in stream.getvalue()
    for _ in range(5):
        logger.warning("nobody")
    made.close()
    assert stream.getvalue().count("3 more lines like this") == 2


def test_a_line_has_an_end_whatever_a_pod_writes(capsys: pytest.CaptureFixture[str]) -> None:
    from kvmesh.logs import LogFormat, LogLevel, configure_logging

    before = logging.getLogger().handlers[:]
    try:
        for form in LogFormat:
            configure_logging(level=LogLevel.INFO, form=form)
            models = {f"model {number}": ["alias"] for number in range(10**5)}
            facts = {"why": "y" * 10**6, "models": models}
            logging.getLogger("kvmesh.test").warning("%s", "x" * 10**6, extra=facts)
            assert len(capsys.readouterr().err) < 4 * LONGEST_TEXT
    finally:
        logging.getLogger().handlers[:] = before

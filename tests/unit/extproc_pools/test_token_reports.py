"""What is said of models that are routed on text only."""

import logging

import pytest

from extproc.pools.pool_tokens import SAID_EVERY_SECONDS, TEXT_ONLY, TokenReporter
from extproc.prompts.prompt_tokens import WINDOW_SECONDS, TokenSource, TokenWatch


def test_a_finding_is_shown_while_it_stands_and_said_once_a_minute_at_most(caplog: pytest.LogCaptureFixture) -> None:
    watch, shown, now = TokenWatch(), list[tuple[str, str, bool]](), 0.0
    reporter = TokenReporter(
        watch=watch,
        show=lambda *, model, reason, stands: shown.append((model, reason, stands)),
        clock=lambda: now,
    )
    caplog.set_level(logging.INFO)

    def took(source: TokenSource, times: int) -> None:
        for _ in range(times):
            watch.took("m", source, why="no pod serves 'm' now" if source is TokenSource.TEXT else "")
        reporter.look()

    took(TokenSource.TEXT, 10)
    took(TokenSource.TEXT, 10)
    assert shown == [("m", TEXT_ONLY, True)]
    assert "no pod serves 'm' now" in reporter.findings["m", TEXT_ONLY].message
    assert "/tokenize" in reporter.findings["m", TEXT_ONLY].message
    took(TokenSource.PODS, 30)
    took(TokenSource.TEXT, 30)
    assert shown[1:] == [("m", TEXT_ONLY, False), ("m", TEXT_ONLY, True)]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]  # the second time is not said yet

    now = SAID_EVERY_SECONDS
    reporter.look()
    reporter.look()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    now += WINDOW_SECONDS
    took(TokenSource.FOLDER, 60)
    assert reporter.findings == {}


def test_a_model_that_is_not_configured_any_more_has_no_finding() -> None:
    watch, shown = TokenWatch(), list[bool]()
    reporter = TokenReporter(watch=watch, show=lambda *, stands, **_: shown.append(stands), clock=lambda: 0.0)
    for _ in range(10):
        watch.took("m", TokenSource.TEXT)
    reporter.look()
    watch.keep(())
    reporter.look()
    assert (shown, reporter.findings) == ([True, False], {})

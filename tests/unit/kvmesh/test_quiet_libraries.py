"""What the Kubernetes client's library logs of each request."""

import logging
from collections.abc import Iterator

import pytest

from kvmesh.logs import LogFormat, LogLevel, configure_logging


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the process's logging as it was."""
    root, library = logging.getLogger(), logging.getLogger("httpx2")
    handlers, levels = list(root.handlers), (root.level, library.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    library.setLevel(levels[1])


@pytest.mark.parametrize(
    ("level", "least"),
    [
        (LogLevel.DEBUG, logging.DEBUG),
        (LogLevel.INFO, logging.WARNING),
        (LogLevel.WARNING, logging.WARNING),
        (LogLevel.ERROR, logging.ERROR),
    ],
)
def test_each_request_to_kubernetes_is_logged_only_where_everything_is(level: LogLevel, least: int) -> None:
    configure_logging(level=level, form=LogFormat.JSON)
    assert logging.getLogger("httpx2").getEffectiveLevel() == least

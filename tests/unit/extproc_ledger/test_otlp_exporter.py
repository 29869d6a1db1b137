"""A collector's answer costs an export neither much memory nor more than its timeout."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from extproc.ledger.otlp_exporter import span_exporter

SECONDS = 1.0
PACKED = gzip.compress(bytes(1 << 20)) * 64  # unpacks to 64 MiB
PIECE = bytes(1 << 16)
MOST_BYTES = 16 << 20  # of sockets' buffers; an endless answer brings more than a hundred in that time
SUCCESS, FAILURE = SpanExportResult.SUCCESS, SpanExportResult.FAILURE

Answer = Callable[["Collector"], None]


class Collector(BaseHTTPRequestHandler):
    """Answers each export."""

    protocol_version = "HTTP/1.1"
    answer: Answer
    sent = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        with suppress(ConnectionError):
            type(self).answer(self)
        self.close_connection = True

    def write(self, data: bytes) -> None:
        self.wfile.write(data)
        type(self).sent += len(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector(answer: Answer) -> Iterator[tuple[str, type[Collector]]]:
    handler = type("Handler", (Collector,), {"answer": answer, "sent": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", handler
    finally:
        server.shutdown()


def packed(self: Collector) -> None:
    self.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(PACKED) + PACKED)


def endless(self: Collector) -> None:
    self.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        self.write(PIECE)


def dripping_body(self: Collector) -> None:
    self.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while True:
        self.write(b" ")
        time.sleep(0.02)


def dripping_headers(self: Collector) -> None:
    self.write(b"HTTP/1.1 200 OK\r\nx-endless: ")
    while True:
        self.write(b"a")
        time.sleep(0.02)


def endless_headers(self: Collector) -> None:
    self.write(b"HTTP/1.1 200 OK\r\nx-endless: ")
    while True:
        self.write(b"a" * 65536)


def overloaded(self: Collector) -> None:
    self.write(b"HTTP/1.1 503 Busy\r\nretry-after: 7\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (packed, SUCCESS),
        (endless, SUCCESS),
        (dripping_body, SUCCESS),
        (dripping_headers, FAILURE),
        (endless_headers, FAILURE),
        (overloaded, FAILURE),  # it says that the export's time does not do
    ],
)
def test_an_export_ends_in_time_whatever_the_answer(answer: Answer, result: SpanExportResult) -> None:
    with collector(answer) as (address, handler):
        began = time.monotonic()
        assert span_exporter(address, timeout_seconds=SECONDS).export(()) is result
        assert time.monotonic() - began < 2 * SECONDS
        assert handler.sent < MOST_BYTES


def test_a_collector_that_is_away_is_asked_again_until_the_timeout() -> None:
    asked: list[float] = []

    def away_at_first(self: Collector) -> None:
        asked.append(time.monotonic())
        if len(asked) > 1:
            self.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    with collector(away_at_first) as (address, _):
        assert span_exporter(address, timeout_seconds=5.0).export(()) is SUCCESS
    assert len(asked) == 2


def test_a_missing_certificate_costs_spans(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem")
    assert span_exporter("https://nowhere/v1/traces", timeout_seconds=SECONDS).export(()) is FAILURE
    assert "No such file" in caplog.text

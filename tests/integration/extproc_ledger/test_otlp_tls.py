"""Spans go to a collector with TLS, with the certificates that the usual OTEL variables name."""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from extproc.ledger.otlp_exporter import span_exporter
from tests.integration.kv_tls import make_authority, make_certificate, tls_front
from tests.integration.otlp_collector import collector


async def test_certificates_are_those_of_the_otel_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = make_authority(tmp_path)
    server, client = (make_certificate(tmp_path, name, authority=authority) for name in ("localhost", "picker"))
    received: list[Any] = []

    async def export() -> SpanExportResult:
        exporter = span_exporter(f"https://localhost:{port}/v1/traces", timeout_seconds=0.5)
        return await asyncio.to_thread(exporter.export, ())

    async with (
        collector(received) as address,
        tls_front(urlsplit(address).port or 0, certificate=server, clients=authority) as port,
    ):
        assert await export() is SpanExportResult.FAILURE, "the authority is unknown"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.cert))
        assert await export() is SpanExportResult.FAILURE, "the collector wants a certificate"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", str(client.cert))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", str(client.key))
        assert await export() is SpanExportResult.SUCCESS
    assert len(received) == 1

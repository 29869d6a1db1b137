"""Exports spans to an OTLP/HTTP collector, and reads only the head of its answers: no body is needed, nor unpacked."""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import aiohttp
from opentelemetry.exporter.http.transport._base import BaseHTTPResult, BaseHTTPTransport
from opentelemetry.exporter.otlp.json.http._internal import _build_transport
from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter


def span_exporter(endpoint: str, *, timeout_seconds: float) -> OTLPSpanExporter:
    """Return an exporter for a thread without an event loop; the usual OTEL variables apply."""
    files = [f"OTEL_EXPORTER_OTLP_TRACES_{name}" for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")]
    transport = _build_transport(None, None, None, files[0], files[1], files[2], transport_factory=_Transport)
    return OTLPSpanExporter(endpoint=endpoint, timeout=timeout_seconds, _transport=transport)


@dataclass(frozen=True, slots=True)
class _Head(BaseHTTPResult):
    fields: Mapping[str, str] = field(default_factory=dict)

    def content(self) -> bytes:
        return b""

    def headers(self) -> Mapping[str, str]:
        return self.fields


class _Transport(BaseHTTPTransport):
    """Opens a connection for each request; aiohttp holds some 100 KiB of an unread body."""

    def __init__(self, *, verify: bool | str, cert: str | tuple[str, str] | None, **_: Any) -> None:
        self._authorities = verify if isinstance(verify, str) else None
        self._certificate = (cert,) if isinstance(cert, str) else cert  # and its key

    @cached_property
    def _tls(self) -> ssl.SSLContext | bool:
        if not self._authorities and not self._certificate:
            return True
        tls = ssl.create_default_context(cafile=self._authorities)
        if self._certificate:
            tls.load_cert_chain(*self._certificate)
        return tls

    def request(self, method: str, url: str, *, timeout: float | None = None, **sent: Any) -> BaseHTTPResult:
        try:
            return asyncio.run(self._head(method, url, aiohttp.ClientTimeout(total=timeout), **sent))
        except (aiohttp.ClientError, OSError) as error:
            return _Head(error=error)

    async def _head(self, method: str, url: str, limit: aiohttp.ClientTimeout, **sent: Any) -> _Head:
        async with (
            aiohttp.ClientSession(timeout=limit, auto_decompress=False) as http,
            http.request(method, url, ssl=self._tls, allow_redirects=False, **sent) as answer,
        ):
            return _Head(status_code=answer.status, reason=answer.reason, fields=answer.headers)

    def is_connection_error(self, exception: Exception | None) -> bool:
        return isinstance(exception, aiohttp.ClientConnectionError)

    def close(self) -> None:
        pass  # no connection is kept

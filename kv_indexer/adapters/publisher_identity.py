"""Tells one publisher process from the next by `process_start_time_seconds` on the pod's /metrics.

Implements `ports.PublisherIdentity`; used by the service, one a stream. Never raises: a pod that does not say is a pod
like any other. (With several API server processes vLLM leaves the line out.)
"""

import asyncio
from math import isfinite

import aiohttp

NAME = b"process_start_time_seconds"
ANSWER_LIMIT_BYTES = 8 << 20


class HttpPublisherIdentity:
    """Asks one pod."""

    def __init__(self, *, http: aiohttp.ClientSession, endpoint: str, timeout_seconds: float = 1.0) -> None:
        self._http = http
        self._url = f"http://{endpoint}/metrics"
        self._timeout = timeout_seconds

    async def started_at(self) -> float | None:
        """See `ports.PublisherIdentity`."""
        try:
            async with asyncio.timeout(self._timeout), self._http.get(self._url) as answer:
                return await self._find(answer) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    async def _find(self, answer: aiohttp.ClientResponse) -> float | None:
        rest, size = b"", 0
        async for chunk in answer.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(NAME):
                    return start_time(line)  # it comes early; the rest is not waited for
            size += len(chunk)
            if size > ANSWER_LIMIT_BYTES:
                return None
        return start_time(rest) if rest.startswith(NAME) else None


def start_time(line: bytes) -> float | None:
    """Read one sample line of the Prometheus text format; None if it has no sensible value."""
    name, _, value = line.strip().partition(b" ")
    if name.partition(b"{")[0] != NAME:
        return None
    try:
        seconds = float(value.split()[0])
    except (ValueError, IndexError):
        return None
    return seconds if isfinite(seconds) and seconds > 0 else None

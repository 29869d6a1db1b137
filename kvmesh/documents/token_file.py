"""The token for a Kubernetes API that somebody renews in a file: read anew every minute, as client-go does."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx2

TOKEN_SECONDS = 60.0  # bound tokens are renewed in the file long before they end


class TokenFile:
    """A token that somebody renews in a file."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._token = ""
        self._read_at: float | None = None

    def token(self) -> str:
        """Return the token, read within the last minute; the last one that was there while the file cannot be read."""
        now = self._clock()
        if self._read_at is None or now - self._read_at >= TOKEN_SECONDS:
            self._read_at = now
            try:
                self._token = self._path.read_text(encoding="utf-8").strip() or self._token
            except OSError:
                return self._token  # the kubelet replaces it just now, or it is gone: the API will say 401
        return self._token

    def refused(self) -> None:
        """Have it read anew at the next request."""
        self._read_at = None


class FreshToken(httpx2.AsyncBaseTransport):
    """Shows the token of a file instead of one that was read long ago; without a file, requests stay as they are."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, tokens: TokenFile | None) -> None:
        self._inner = inner
        self._tokens = tokens

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send it on."""
        if self._tokens is not None and (token := self._tokens.token()):
            request.headers["Authorization"] = f"Bearer {token}"
        response = await self._inner.handle_async_request(request)
        if self._tokens is not None and response.status_code == 401:
            self._tokens.refused()
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

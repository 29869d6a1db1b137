"""One HTTP question with a deadline and a bound; whatever goes wrong is part of the answer. Used by the gatherers."""

import asyncio
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from kvmesh.admin.admin_login import AdminLogin
from kvmesh.errors import SettingError

ANSWER_LIMIT_BYTES = 64 << 20  # Envoy's configuration in a large mesh
HALF_A_SECOND = 0.5  # a Date header is cut to whole seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """An answer; `status` is 0 and `problem` says why where there is none."""

    status: int = 0
    body: bytes = b""
    problem: str = ""
    clock_ahead_seconds: float | None = None  # the server's, of ours; half a second exact at best

    @property
    def refusal(self) -> str:
        """What an admin page says where it lets us not in, '' where it does."""
        if self.status not in {401, 403, 429}:
            return ""
        said = self.json()
        words = said.get("error") if isinstance(said, dict) else None
        return f"it lets us not in ({self.status}): {words}" if isinstance(words, str) else ""

    def json(self) -> Any:
        """Return the body as JSON, None where it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            return None


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    *,
    timeout_seconds: float,
    post: bytes | None = None,
    limit_bytes: int = ANSWER_LIMIT_BYTES,
    login: AdminLogin | None = None,
) -> Page:
    """GET the URL, or POST JSON to it. Never raises for what the other side does.

    `login` is shown to this address alone: it then is not followed to another one.
    """
    began = time.time()
    try:
        async with asyncio.timeout(timeout_seconds):
            headers = {} if post is None else {"content-type": "application/json"}
            shown: dict[str, Any] = {"ssl": login.tls(), "allow_redirects": False} if login is not None else {}
            headers |= login.headers() if login is not None else {}
            request = http.request("GET" if post is None else "POST", url, data=post, headers=headers, **shown)
            async with request as answer:
                ahead = _clock_ahead(answer.headers.get("Date"), began=began, ended=time.time())
                body = bytearray()
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > limit_bytes:
                        return Page(problem=f"its answer is longer than {limit_bytes} bytes")
                return Page(status=answer.status, body=bytes(body), clock_ahead_seconds=ahead)
    except TimeoutError:
        return Page(problem=f"no answer within {timeout_seconds:g} s")
    except aiohttp.ClientConnectorError as error:
        return Page(problem=f"cannot connect: {error.strerror or error}")
    except aiohttp.InvalidURL:
        return Page(problem="is no URL like http://127.0.0.1:9090")
    except (aiohttp.ClientError, OSError, ValueError, SettingError) as error:
        return Page(problem=str(error) or type(error).__name__)


def _clock_ahead(date: str | None, *, began: float, ended: float) -> float | None:
    """Return how far the server's clock is ahead, or None where its Date header does not tell."""
    try:
        said = parsedate_to_datetime(date or "").timestamp() + HALF_A_SECOND
    except (ValueError, TypeError, IndexError):
        return None
    return said - (began + ended) / 2

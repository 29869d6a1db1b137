"""A client of the raw protocol, for tests: says what it sends and shows all that comes back."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.kube_api.errors import Document

JSON = "application/json"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
OPERATIONS = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    code: int
    document: Document
    warnings: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return str(self.document["metadata"]["resourceVersion"])

    @property
    def causes(self) -> set[tuple[str, str]]:
        """The wrong fields of a 422 or the contested ones of a 409: (reason, field)."""
        causes = self.document.get("details", {}).get("causes", ())
        return {(cause["reason"], cause["field"]) for cause in causes}


class WatchStream:
    """The events of one watch, as they come."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    async def next(self) -> tuple[str, Document]:
        """The next event's type and object; EOFError once the server has ended the watch."""
        async with asyncio.timeout(ANSWER_SECONDS):
            line = await self._content.readline()
        if not line:
            raise EOFError
        event = json.loads(line)
        return event["type"], event["object"]


class Rest:
    """Asks one server, with the same headers each time."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        self._session = session
        self._url = url
        self._headers = headers

    def as_user(self, user: str) -> "Rest":
        """The same server, in the name of somebody else (the caller must be allowed to)."""
        return Rest(self._session, self._url, {**self._headers, "Impersonate-User": user})

    async def ask(self, method: str, path: str, body: Any = None, *, media: str = JSON, accept: str = JSON) -> Answer:
        headers = {**self._headers, "Accept": accept, "Content-Type": media}
        data = None if body is None else json.dumps(body)
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            self._session.request(method, self._url + path, data=data, headers=headers) as response,
        ):
            warnings = tuple(response.headers.getall("Warning", ()))
            text = await response.text()
            document = json.loads(text) if response.content_type == JSON else {"text": text}
            return Answer(code=response.status, document=document, warnings=warnings)

    @asynccontextmanager
    async def watch(self, path: str) -> AsyncIterator[WatchStream]:
        """A watch of that list; `path` brings its own parameters, but for `watch`."""
        url = self._url + path + ("&" if "?" in path else "?") + "watch=true"
        limits = aiohttp.ClientTimeout(total=None, connect=ANSWER_SECONDS)
        async with self._session.get(url, headers=self._headers, timeout=limits) as response:
            yield WatchStream(response.content)


@asynccontextmanager
async def rest(url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Rest]:
    """A client until the block ends; `tls` says whom it trusts and who it is."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or True)) as session:
        yield Rest(session, url, headers)

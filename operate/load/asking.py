"""Sends requests over HTTP(S) to a gateway, or to pods in turn. Every request has its own connection.

So each request counts as a separate client, and none uses a keep-alive connection that the server is about to close.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import msgspec

from extproc.errors import ConfigError, KvmeshError
from kvmesh.bounded_answer import pieces_within, read_within
from kvmesh.plain_text import printable
from operate.load.clients import Ask
from operate.load.request_body import Message, request_of
from operate.load.script import Session, Turn
from operate.load.streamed_answer import BROKE_OFF, OK, BadAnswerError, StreamedAnswer

UPSTREAM_HEADER = "x-kvmesh-upstream"  # set by Envoy: the pod's address
SHOWN_BYTES = 2000
ATTEMPTS = 3  # as in Envoy: on a refused connection the next pod is tried
PREFLIGHT_SECONDS = 10.0
UNAUTHORIZED, FORBIDDEN = 401, 403


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The servers to ask (`urls`, in turn), the model and the headers."""

    urls: Sequence[str]  # without a path
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a key


def open_http() -> aiohttp.ClientSession:
    """Open the HTTP session for all requests; needs a running loop. The caller closes it."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False)


def ask_by(http: aiohttp.ClientSession, target: Target, *, salt: str) -> Ask:
    """Return a function that sends a request to the next of the target's URLs."""
    urls = itertools.cycle(target.urls)
    attempts = min(ATTEMPTS, len(target.urls))

    async def ask(session: Session, turn: Turn, messages: Sequence[Message], answer: StreamedAnswer) -> None:
        path, body = request_of(session, turn, messages, model=target.model, salt=salt)
        content = msgspec.json.encode(body)
        for attempt in range(1, attempts + 1):
            url = next(urls)
            answer.server = url.partition("://")[2]
            try:
                await _exchange(http, f"{url}{path}", content, target.headers, answer)
            except aiohttp.ClientConnectorError as error:
                if attempt == attempts:
                    raise BadAnswerError(f"no connection: {_why(error)}") from error
            except aiohttp.ClientPayloadError as error:
                raise BadAnswerError(BROKE_OFF) from error
            except aiohttp.ServerDisconnectedError as error:
                raise BadAnswerError("the connection ended before an answer") from error
            except aiohttp.ClientError as error:
                raise BadAnswerError(f"{type(error).__name__}: {error}") from error
            else:
                return

    return ask


async def _exchange(
    http: aiohttp.ClientSession, url: str, content: bytes, headers: Mapping[str, str], answer: StreamedAnswer
) -> None:
    sent = {"content-type": "application/json", **headers}
    async with http.post(url, data=content, headers=sent, allow_redirects=False) as response:
        answer.status = response.status
        answer.headers = {name.lower(): value for name, value in response.headers.items()}
        answer.server = answer.headers.get(UPSTREAM_HEADER) or answer.server
        if response.status != OK:
            answer.refusal = (await response.content.read(SHOWN_BYTES)).decode(errors="replace")
            return
        async for data in pieces_within(response):
            answer.feed(data, at=time.monotonic())
            if answer.done:
                return


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


async def served_model(http: aiohttp.ClientSession, target: Target) -> str:
    """Return the target's model, or else the first that a server lists. At least one server must answer in either case.

    Raise KvmeshError if no server answers or no model is listed, ConfigError for an invalid URL.
    """
    for url in target.urls[:-1]:
        with suppress(KvmeshError):
            return await _model_at(http, url, target)
    return await _model_at(http, target.urls[-1], target)


async def _model_at(http: aiohttp.ClientSession, url: str, target: Target) -> str:
    timeout, page = aiohttp.ClientTimeout(total=PREFLIGHT_SECONDS), f"{url}/v1/models"
    try:
        async with http.get(page, headers=target.headers, timeout=timeout, allow_redirects=False) as response:
            status, content = response.status, await read_within(response)
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise ConfigError(f"{url!r} is not a URL like http://127.0.0.1:10000") from error
    except (aiohttp.ClientError, OSError) as error:
        hint = " (SSL_CERT_FILE names other authorities)" if isinstance(error, aiohttp.ClientSSLError) else ""
        raise KvmeshError(
            f"nobody answers at {url}: {_why(error)}{hint}; start a demo with `kvmesh up`, or name another server with "
            "--server"
        ) from error
    if status in (UNAUTHORIZED, FORBIDDEN):
        raise KvmeshError(f"{page} refuses (status {status}): if it wants a key, give --pod-key-file")
    if target.model:
        return target.model
    try:
        return msgspec.json.decode(content, type=_Models).data[0].id
    except (msgspec.MsgspecError, ValueError, RecursionError, IndexError):
        words = printable(content[:SHOWN_BYTES].decode(errors="replace"))[:100]
        raise KvmeshError(f"{page} names no model (status {status}: {words}); give --model") from None


def _why(error: BaseException) -> str:
    """Return the reason without the address, which the message already has."""
    if isinstance(error, TimeoutError):
        return f"no answer in {PREFLIGHT_SECONDS:g} s"
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    text = inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner)
    if text.startswith("Connect call failed"):  # asyncio's text for any refused connection
        return "connection refused"
    return printable(text) or type(error).__name__

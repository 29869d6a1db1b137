"""HTTP and gRPC requests to other programs, each with a deadline; failures are part of the result."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from kvmesh.admin.admin_login import AdminLogin
from kvmesh.bounded_answer import read_within
from kvmesh.errors import SettingError
from kvmesh.pods.http_response import HttpResponseError
from kvmesh.pods.pod_http import PodPages
from kvmesh.pods.pod_key import PodKey

POD_ANSWER_BYTES = 256 << 10  # decoding a list of this size takes 1 ms
HALF_A_SECOND = 0.5  # mean error of a Date header, which has whole seconds
CONNECTIONS = 64  # concurrent
CONNECTIONS_TO_A_POD = 4  # kept alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A response, or the reason (`problem`, with `status` 0) why there is none."""

    status: int = 0
    body: bytes = b""
    problem: str = ""
    clock_ahead_seconds: float | None = None  # relative to ours; accurate to half a second at best

    @property
    def refusal(self) -> str:
        """The message of an admin page that denies access, or ''."""
        if self.status not in {401, 403, 429}:
            return ""
        message = _field(self.json(), "error")
        return f"it lets us not in ({self.status}): {message}" if isinstance(message, str) else ""

    def json(self) -> Any:
        """Return the body parsed as JSON, or None if it is invalid."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            return None

    @property
    def content(self) -> Any:
        """The JSON of a 200 response, else None."""
        return self.json() if self.status == 200 else None

    def field(self, name: str) -> Any:
        """Return a field of the JSON object in a 200 response, or None."""
        return _field(self.content, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Sends HTTP requests with a common deadline. Failures of the other side are returned, not raised."""

    http: aiohttp.ClientSession
    pods: PodPages
    timeout_seconds: float
    login: AdminLogin  # sent only to admin pages of picker and indexer

    async def ask_admin(self, url: str, *, post: bytes | None = None) -> Page:
        """Ask an admin page of picker or indexer with the login, without following redirects."""
        return await self.ask(url, post=post, shows_login=True)

    async def ask_pod(
        self, endpoint: str, path: str, *, post: bytes | None = None, limit_bytes: int = POD_ANSWER_BYTES
    ) -> Page:
        """GET a pod's page, or POST JSON to it; cheap enough for a running picker."""
        began, seconds = time.time(), self.timeout_seconds
        try:
            if post is None:
                answer = await self.pods.get(endpoint, path, timeout_seconds=seconds, max_body_bytes=limit_bytes)
            else:
                answer = await self.pods.post(endpoint, path, post, timeout_seconds=seconds, max_body_bytes=limit_bytes)
        except TimeoutError:
            return Page(problem=f"no answer within {seconds:g} s")
        except HttpResponseError as error:
            return Page(problem=str(error))
        except OSError as error:
            return Page(problem=f"cannot connect: {error.strerror}" if error.strerror else str(error))
        date = answer.date.decode("ascii", "replace")
        ahead = _clock_ahead(date, began=began, ended=time.time())
        return Page(status=answer.status, body=answer.body, clock_ahead_seconds=ahead)

    async def ask(self, url: str, *, post: bytes | None = None, shows_login: bool = False) -> Page:
        """GET the URL, or POST JSON to it."""
        began = time.time()
        try:
            async with asyncio.timeout(self.timeout_seconds):
                headers = {} if post is None else {"content-type": "application/json"}
                shown: dict[str, Any] = {"ssl": self.login.tls(), "allow_redirects": False} if shows_login else {}
                headers |= self.login.headers() if shows_login else {}
                method = "GET" if post is None else "POST"
                async with self.http.request(method, url, data=post, headers=headers, **shown) as answer:
                    ahead = _clock_ahead(answer.headers.get("Date"), began=began, ended=time.time())
                    body = await read_within(answer)
                    return Page(status=answer.status, body=body, clock_ahead_seconds=ahead)
        except TimeoutError:
            return Page(problem=f"no answer within {self.timeout_seconds:g} s")
        except aiohttp.ClientConnectorError as error:
            return Page(problem=f"cannot connect: {error.strerror or error}")
        except aiohttp.InvalidURL:
            return Page(problem="is no URL like http://127.0.0.1:9090")
        except (aiohttp.ClientError, OSError, ValueError, SettingError) as error:
            return Page(problem=str(error) or type(error).__name__)


@asynccontextmanager
async def open_client(
    *, timeout_seconds: float, login: AdminLogin, pod_key: PodKey | None = None
) -> AsyncIterator[Client]:
    """Open a client for the context; `pod_key` is sent only to pods."""
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=True, trust_env=False) as http:
        pods = PodPages(most_kept=CONNECTIONS_TO_A_POD, key=pod_key)
        try:
            yield Client(http=http, pods=pods, timeout_seconds=timeout_seconds, login=login)
        finally:
            pods.close()


def _field(content: Any, name: str) -> Any:
    return content.get(name) if isinstance(content, dict) else None


def _clock_ahead(date: str | None, *, began: float, ended: float) -> float | None:
    """Return the server's clock lead in seconds, or None without a valid Date header."""
    try:
        said = parsedate_to_datetime(date or "").timestamp() + HALF_A_SECOND
    except (ValueError, TypeError, IndexError):
        return None
    return said - (began + ended) / 2


async def ask_health(address: str, *, timeout_seconds: float) -> str:
    """Query the gRPC health service, as Envoy and Kubernetes do.

    Return SERVING, NOT_SERVING, or an error message. Failures of the other side are returned, not raised.
    """
    # Read once, when gRPC is loaded. `kvmesh up` forks children meanwhile; gRPC's fork handlers were seen to crash a
    # child before its exec and to break our own connections. The children do not need gRPC between fork and exec.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # late import: the picker loads the doctor for its start-up checks, which do not call this
    import grpc  # noqa: PLC0415
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    try:
        # gRPC's own deadline does not cover everything
        async with asyncio.timeout(timeout_seconds + 1), grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    except TimeoutError:
        return f"no answer within {timeout_seconds:g} s"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

"""When is a process ready: conditions as values, and waiting for them with a deadline.

Used by `processes` for its children and by `command` for what it did not start. Waits only; starts and ends nothing.
"""

import asyncio
from dataclasses import dataclass

import aiohttp

from extproc.doctor.questions import ask_health
from extproc.local.errors import NotReadyError
from extproc.local.redis_choice import redis_label
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.plain_text import printable
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.link import ping

ATTEMPT_SECONDS = 2.0
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReady:
    """Ready once a GET of `url` is answered with 200."""

    url: str

    def __str__(self) -> str:
        return f"GET {self.url}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisReady:
    """Ready once Redis answers PING."""

    access: RedisAccess

    def __str__(self) -> str:
        return f"PING {redis_label(self.access)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcReady:
    """Ready once the gRPC health service at `address` (host:port) says SERVING for the whole server."""

    address: str

    def __str__(self) -> str:
        return f"gRPC health of {self.address}"


Condition = HttpReady | RedisReady | GrpcReady


async def wait_until_ready(condition: Condition, *, name: str, within_seconds: float) -> None:
    """Return once the condition holds; raise NotReadyError naming `name` and the last answer at the deadline."""
    answer = "nothing"
    try:
        async with asyncio.timeout(within_seconds):
            while (answer := await _first_failure(condition)) != "":  # noqa: ASYNC110  (nothing of ours to wait on)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise NotReadyError(f"{name} was not ready within {within_seconds:g} s ({condition}: {answer})") from None


async def _first_failure(condition: Condition) -> str:
    """Why the condition does not hold now, or the empty string."""
    try:
        async with asyncio.timeout(ATTEMPT_SECONDS):
            match condition:
                case HttpReady(url=url):
                    return await _check_http(url)
                case RedisReady(access=access):
                    return await _check_redis(access)
                case GrpcReady(address=address):
                    return await _check_grpc(address)
    except TimeoutError:
        return f"no answer in {ATTEMPT_SECONDS:g} s"


async def _check_http(url: str) -> str:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return "" if response.status == 200 else f"status {response.status}"
    except (aiohttp.ClientError, OSError) as error:
        return str(error)


async def _check_redis(access: RedisAccess) -> str:
    try:
        await ping(access, timeout_seconds=ATTEMPT_SECONDS)
    except (IndexUnavailableError, RedisUrlError) as error:
        return printable(str(error))
    return ""


async def _check_grpc(address: str) -> str:
    health = await ask_health(address, timeout_seconds=ATTEMPT_SECONDS)
    return "" if health == "SERVING" else health

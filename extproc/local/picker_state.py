"""What the picker's admin page says about itself (`GET /state`), as typed values.

Read by `live_view`, `top_view` and tests; fields that a newer picker adds are ignored.
"""

import asyncio

import aiohttp
import msgspec

from kvmesh.admin.admin_login import AdminLogin
from kvmesh.errors import SettingError

FETCH_SECONDS = 2.0


class EndpointState(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as the picker sees it; `share`, `kv_usage` and `hit_rate` are 0..1, None is a number nobody knows."""

    address: str
    state: str
    cached_blocks: int = 0
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    hit_rate: float | None = None
    bookings: int = 0
    picks: int = 0
    share: float = 0.0


class IndexState(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix index as the picker sees it: ok, stale or unavailable."""

    state: str
    sources: int = 0


class DecisionState(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request; `at` is Unix time in seconds."""

    at: float
    request_id: str | None = None
    model: str | None = None
    path: str | None = None
    endpoint: str | None = None
    status: int = 200
    matched_tokens: int = 0
    prompt_tokens: int = 0
    reasons: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()


class ClassState(msgspec.Struct, frozen=True, kw_only=True):
    """One priority class: how many of its requests wait, and what is taken from it."""

    name: str = msgspec.field(name="class")
    waiting: int = 0
    steps: tuple[str, ...] = ()


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One of several pools in short."""

    pool: str
    endpoints: int = 0
    ready: int = 0
    open_requests: int = 0
    waiting: int = 0


class PickerState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole page; decisions are newest first, classes the most important first."""

    now: float
    endpoints: tuple[EndpointState, ...] = ()
    index: IndexState = IndexState(state="unknown")
    decisions: tuple[DecisionState, ...] = ()
    classes: tuple[ClassState, ...] = ()
    pool: str | None = ""  # None: the picker serves several, and none was named
    pools: tuple[PoolState, ...] = ()


async def fetch_state(
    session: aiohttp.ClientSession, admin_url: str, *, pool: str | None = None, login: AdminLogin | None = None
) -> PickerState | str:
    """The state now, or why it is not to be had."""
    login = login or AdminLogin()
    try:
        headers, tls = login.headers(), login.tls()  # anew: files are replaced
        parameters = {"pool": pool} if pool is not None else {}
        async with (
            asyncio.timeout(FETCH_SECONDS),
            session.get(
                f"{admin_url}/state", params=parameters, headers=headers, ssl=tls, allow_redirects=False
            ) as response,
        ):
            content = await response.read()
            if response.status != 200:
                return f"GET {admin_url}/state: status {response.status}{_words(content)}"
            return msgspec.json.decode(content, type=PickerState)
    except TimeoutError:
        return f"GET {admin_url}/state: no answer in {FETCH_SECONDS:g} s"
    except SettingError as error:
        return str(error)
    except (aiohttp.ClientError, msgspec.MsgspecError, OSError, ValueError) as error:
        return f"GET {admin_url}/state: {error}"


class _Problem(msgspec.Struct):
    error: str


def _words(content: bytes) -> str:
    """The words for people in an error's body, if it has any."""
    try:
        return f": {msgspec.json.decode(content, type=_Problem).error[:300]}"
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""

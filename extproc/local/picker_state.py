"""What the picker's admin page says about itself (`GET /state`), as typed values.

Read by `live_view` and by tests; fields that a newer picker adds are ignored.
"""

import asyncio

import aiohttp
import msgspec

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


class PickerState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole page; decisions are newest first."""

    now: float
    endpoints: tuple[EndpointState, ...] = ()
    index: IndexState
    decisions: tuple[DecisionState, ...] = ()


async def fetch_state(session: aiohttp.ClientSession, admin_url: str) -> PickerState | str:
    """The state now, or why it is not to be had."""
    try:
        async with asyncio.timeout(FETCH_SECONDS), session.get(f"{admin_url}/state") as response:
            if response.status != 200:
                return f"GET {admin_url}/state: status {response.status}"
            return msgspec.json.decode(await response.read(), type=PickerState)
    except TimeoutError:
        return f"GET {admin_url}/state: no answer in {FETCH_SECONDS:g} s"
    except (aiohttp.ClientError, msgspec.MsgspecError, OSError, ValueError) as error:
        return f"GET {admin_url}/state: {error}"

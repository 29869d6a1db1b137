"""Asks a pod which model it serves (`GET /v1/models`), for the commands that `kvmesh up` prints."""

import asyncio
from collections.abc import Iterable

import aiohttp
import msgspec

from extproc.local.envoy_config import SocketAddress

ASK_SECONDS = 2.0


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


async def first_served_model(pods: Iterable[SocketAddress]) -> str | None:
    """The first model of the first pod that answers, or None."""
    async with aiohttp.ClientSession() as session:
        for pod in pods:
            try:
                async with asyncio.timeout(ASK_SECONDS), session.get(f"http://{pod}/v1/models") as response:
                    models = msgspec.json.decode(await response.read(), type=_Models)
            except (TimeoutError, aiohttp.ClientError, msgspec.MsgspecError, OSError):
                continue
            if models.data:
                return models.data[0].id
    return None

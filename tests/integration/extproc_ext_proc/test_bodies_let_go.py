"""However an exchange ends, its body is free at once: nothing that refers to it in a circle waits for the collector.

The collector may not come for minutes, and a body has megabytes.
"""

import asyncio
import gc
import gzip
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

import grpc
import pytest

from extproc.ext_proc.exchange import BodyMode
from extproc.ledger.facts import DecisionRecord
from extproc.models.models import ModelTable
from extproc.settings.config import GrpcServer
from tests.integration.hermetic_envoy import Envoy
from tests.integration.hermetic_picker import Picker, running_picker
from tests.integration.hermetic_pods import PodState
from tests.integration.overload_picker import policy

TINY_MODEL = Path(__file__).parents[3] / "podsim" / "tiny_model"
CHAT = "/v1/chat/completions"
TENANT, OBJECTIVE = "x-gateway-inference-fairness-id", "x-gateway-inference-objective"
CHUNK_BYTES = 62_000
LONG_BYTES = 600_000  # of a body: two of its chunks are no such object
ENVOY = Envoy(mode=BodyMode.FULL_DUPLEX_STREAMED, raw=True)
TEXT = b'{"model": "my-model", "messages": [{"role": "user", "content": "' + b"word " * (LONG_BYTES // 5) + b'"}]}'
BODIES = {
    "routed": (TEXT, {}),
    "unpacked": (gzip.compress(TEXT), {"content-encoding": "gzip"}),
    "no JSON": (TEXT[:-2], {}),
    "wrong type": (TEXT.replace(b'"my-model"', b"17"), {}),
    "damaged": (gzip.compress(TEXT, compresslevel=0)[:-9], {"content-encoding": "gzip"}),
    "too large": (TEXT * 2, {}),
    "unpacks to too much": (gzip.compress(TEXT * 2), {"content-encoding": "gzip"}),
    "unknown model": (TEXT.replace(b"my-model", b"no-model"), {}),
    "no endpoint": (TEXT, {"subset": "10.9.9.9:1"}),
    "over quota": (gzip.compress(TEXT), {"content-encoding": "gzip", TENANT: "blocked"}),
    "shed": (TEXT, {OBJECTIVE: "at-once"}),
    "waits in vain": (TEXT, {OBJECTIVE: "sheddable"}),
}
POLICY = policy(
    quotas=[{"tenant": "blocked", "concurrentRequests": 0}],
    classes={
        "at-once": {"priority": -2, "sheddable": True, "queueRequests": 0},
        "sheddable": {"queueSeconds": 0.05, "ttftSeconds": 600},
    },
)


@contextmanager
def nothing_long_left() -> Iterator[None]:
    """Fail where garbage that only the collector finds holds something long."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        held = [*gc.garbage, *gc.get_referents(*gc.garbage)]
        long = [one for one in held if isinstance(one, str | bytes | bytearray) and sys.getsizeof(one) > LONG_BYTES / 2]
        holders = {type(each).__name__ for one in long for each in gc.garbage if one in gc.get_referents(each)}
        assert not long, f"{len(long)} long texts are held by {sorted(holders)}"
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def nothing_of_requests_is_remembered() -> None:
    """Fail where a record of a decision leads to an error, whose traceback has the body, or to a long text."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [one for one in gc.get_objects() if type(one) is DecisionRecord]
    assert waiting, "no decision is remembered"
    while waiting:
        one = waiting.pop()
        if id(one) not in found and not isinstance(one, type | ModuleType):
            found[id(one)] = one
            waiting += gc.get_referents(one)
    kinds = {type(one).__name__ for one in found.values() if isinstance(one, BaseException | TracebackType | FrameType)}
    assert not kinds
    assert not [type(one) for one in found.values() if sys.getsizeof(one) > LONG_BYTES / 2]


async def all_ended(picker: Picker) -> None:
    """Wait until the picker knows of the end of every stream."""
    await picker.eventually("/state", lambda state: sum(pod["bookings"] for pod in state["endpoints"]) == 0)
    async with asyncio.timeout(10):
        while await picker.metric("kvmesh_unfinished_body_bytes"):
            await asyncio.sleep(0.01)


def chunks_of(body: bytes) -> list[bytes]:
    return [body[start : start + CHUNK_BYTES] for start in range(0, len(body), CHUNK_BYTES)]


@pytest.mark.parametrize(
    ("kind", "server"), [*((kind, GrpcServer.OWN) for kind in BODIES), ("routed", GrpcServer.GRPCIO)]
)
async def test_a_body_is_free_when_its_exchange_is_over(kind: str, server: GrpcServer) -> None:
    body, headers = BODIES[kind]
    subset = headers.get("subset")
    sent = {"content-type": "application/json"} | {name: value for name, value in headers.items() if name != "subset"}
    async with running_picker(
        [PodState(waiting=100 if OBJECTIVE in headers else 0)],
        policy=POLICY,
        model="my-model",
        tokenizer_folder=TINY_MODEL,
        models=ModelTable(only_listed=True),
        max_body_bytes=len(TEXT) + 1000,
        grpc_server=server,
    ) as picker:
        for counted in (False, True):  # what is made once, at the first request, is no leak
            with nothing_long_left() if counted else nullcontext():
                for _ in range(3):
                    # a refusal may come while the rest of the body is written
                    with suppress(grpc.aio.AioRpcError):
                        async with ENVOY.exchange(picker.grpc_address) as exchange:
                            await exchange.request(*chunks_of(body), path=CHAT, headers=sent, subset=subset)
                await all_ended(picker)
        if "too" not in kind:  # those are refused before there is a decision
            nothing_of_requests_is_remembered()


@pytest.mark.parametrize("server", GrpcServer)
async def test_a_body_that_is_given_up_is_free_at_once(server: GrpcServer) -> None:
    async with running_picker(
        [PodState()], model="my-model", tokenizer_folder=TINY_MODEL, grpc_server=server
    ) as picker:
        with nothing_long_left():
            for _ in range(3):
                async with ENVOY.exchange(picker.grpc_address) as exchange:
                    await exchange.give_up(*chunks_of(TEXT), path=CHAT)
            await all_ended(picker)

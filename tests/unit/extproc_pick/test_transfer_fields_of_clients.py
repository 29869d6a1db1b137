"""On every way by which a body reaches a pod, the client's transfer fields and its rank are gone, and no other byte."""

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from extproc.errors import KvmeshError
from extproc.models.models import ModelTable
from extproc.pick import pick
from extproc.policy.request_class import PriorityPolicy
from extproc.pools.pool_runtime import PoolRuntime
from extproc.requests.client_body import FieldsNotRemovedError
from extproc.requests.json_body import LONG_BODY_BYTES
from tests.unit.extproc_pick.pick_fakes import CHAT, POLICY, facts, pod, runtime

FIELD = b'"kv_transfer_params": {"remote_host": "10.6.6.6"}, '
LEFT = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
GIVEN = LEFT.replace(b'"stream"', FIELD + b'"vllm_xargs": {' + FIELD + b'"x": 1}, "stream"')
LEFT = LEFT.replace(b'"stream"', b'"vllm_xargs": {"x": 1}, "stream"')
RANK = {"x-data-parallel-rank": "1"}


def shadow() -> PoolRuntime:
    return runtime(pod("a"), policy=replace(POLICY, priorities=PriorityPolicy(shadow=True)))


def unknown_models() -> PoolRuntime:
    return runtime(pod("a"), models=ModelTable())


def open_pool() -> PoolRuntime:
    pool = runtime()
    pool.anywhere = lambda: ("a",)
    return pool


@pytest.mark.parametrize("pool", [lambda: runtime(pod("a")), shadow, unknown_models, open_pool])
@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (CHAT, {}),
        ("/v1/completions", {}),
        ("/v1/messages", {}),
        ("/inference/v1/generate", {}),
        ("/invocations", {}),
        ("/v1/embeddings", {}),
        ("/of/another/api", {}),
        (CHAT, {"content-type": "text/plain"}),
        (CHAT + "/render", {}),
    ],
)
async def test_a_pod_gets_no_field_and_no_rank(
    pool: Callable[[], PoolRuntime], path: str, headers: dict[str, str]
) -> None:
    given, left = GIVEN, LEFT
    if path == "/v1/completions":
        given, left = (body.replace(b'"messages": [{"role": "user", "content": "hi"}]', b'"prompt": "hi"')
                       for body in (GIVEN, LEFT))  # fmt: skip
    elif "generate" in path:
        given, left = (body.replace(b'"messages"', b'"token_ids": [1], "messages"') for body in (GIVEN, LEFT))
    parts = pool()
    exchange = await pick(facts(path=path, headers=headers | RANK), given, parts)
    assert (exchange.body, exchange.removed_headers) == (left, ("x-data-parallel-rank",))
    exchange.finish()
    exchange = await pick(facts(path=path, headers=headers | RANK), left, parts)
    assert (exchange.body, exchange.removed_headers) == (None, ("x-data-parallel-rank",))
    exchange.finish()


@pytest.mark.parametrize("pool", [lambda: runtime(pod("a")), open_pool])
@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("gzip", lambda body: body),
        (None, lambda body: body.decode().encode("utf-16")),
    ],
)
async def test_a_body_in_another_form_is_changed_into_a_plain_one(
    pool: Callable[[], PoolRuntime], coding: str | None, pack: Callable[[bytes], bytes]
) -> None:
    headers = {"content-encoding": coding} if coding is not None else {}
    exchange = await pick(facts(headers=headers), pack(GIVEN), pool())
    assert (exchange.body, exchange.removed_headers) == (LEFT, tuple(headers))
    exchange.finish()
    exchange = await pick(facts(headers=headers), pack(LEFT), pool())
    assert (exchange.body, exchange.removed_headers) == (None, ())
    exchange.finish()


@pytest.mark.parametrize("pool", [lambda: runtime(pod("a")), open_pool])
async def test_a_long_body_loses_them_too(pool: Callable[[], PoolRuntime]) -> None:
    given, left = (body.replace(b"hi", b"hi " * LONG_BODY_BYTES) for body in (GIVEN, LEFT))
    exchange = await pick(facts(), given, pool())
    assert exchange.body == left
    exchange.finish()


@pytest.mark.parametrize("path", [CHAT, "/of/another/api"])
@pytest.mark.parametrize("pool", [lambda: runtime(pod("a")), open_pool])
async def test_a_body_that_may_have_one_and_cannot_be_changed_is_refused(
    path: str, pool: Callable[[], PoolRuntime]
) -> None:
    with pytest.raises(FieldsNotRemovedError) as refused:
        await pick(facts(path=path), GIVEN[:-1], pool())
    assert (refused.value.status, refused.value.reason) == (400, "malformed-json")


async def test_where_the_body_was_not_read_a_pool_fails_open_only_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = open_pool()

    def defect(*_: Any) -> None:
        raise KvmeshError("planted")

    monkeypatch.setattr(type(pool.reader), "parse", defect)
    exchange = await pick(facts(headers=RANK), GIVEN, pool)
    assert (exchange.body, exchange.removed_headers) == (LEFT, ("x-data-parallel-rank",))
    exchange.finish()
    with pytest.raises(KvmeshError):
        await pick(facts(), GIVEN[:-1], pool)


async def test_a_rule_changes_what_is_left() -> None:
    pool = runtime(pod("a"), policy=replace(POLICY, priorities=PriorityPolicy(engine_priority=True)))
    exchange = await pick(facts(path="/v1/responses"), b'{"model": "tiny", "input": "a", ' + FIELD + b'"x": 1}', pool)
    assert exchange.body is not None
    found = json.loads(exchange.body)
    assert (found.pop("request_id").startswith("resp_"), found) == (True, {"model": "tiny", "input": "a", "x": 1})
    exchange.finish()

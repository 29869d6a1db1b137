"""An upgrade finds the Redis of an earlier version: it reads it rightly or, with another prefix, not at all.

In both cases pickers, indexers and pods that start on it serve at once, and the index becomes true. The content was
recorded from a real Redis by `python -m tools.record_version`.
"""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.redis.keys import PREFIX
from tests.e2e.stack import eventually, free_port_range, running_stack
from tests.integration.kv_redis import RedisServer
from tools.docs_site import REPOSITORY
from tools.record_version import PLACES, PROMPTS, lookup, pages

RECORDED = sorted(path for path in (REPOSITORY / "tests" / "data" / "versions").iterdir() if path.is_dir())
HELD_MS = 60_000
MILLISECONDS = re.compile(r"\b1[78]\d{11}\b")


@contextmanager
def restored(
    version: Path, folder: Path, *, addresses: tuple[str, ...] = PLACES, later_ms: int = 0
) -> Iterator[tuple[RedisServer, Any]]:
    """Yield a real Redis with the content of an earlier version, and the record.

    With `later_ms` its times are those of now and so much more, so that the leases of then hold.
    """
    text = (version / "redis.json").read_text(encoding="utf-8")
    for place, address in zip(PLACES, addresses, strict=True):
        text = text.replace(place, address)
    record = json.loads(text)
    if later_ms:
        by = int(time.time() * 1000) - record["at_ms"] + later_ms
        record["keys"] = json.loads(MILLISECONDS.sub(lambda found: str(int(found[0]) + by), json.dumps(record["keys"])))
    server = RedisServer(folder)
    server.start()
    try:
        put(server.client(), record["keys"])
        yield server, record
    finally:
        server.kill()


def put(client: Any, keys: dict[str, Any]) -> None:
    """Write recorded keys."""
    for name, entry in keys.items():
        key, value = name.encode("latin-1"), encoded(entry["value"])
        if entry["type"] == "string":
            client.set(key, value)
        elif entry["type"] == "hash":
            client.hset(key, mapping=value)
        elif entry["type"] == "set":
            client.sadd(key, *value)
        else:
            raise AssertionError(f"no way to write a {entry['type']}")


def encoded(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("latin-1")
    if isinstance(value, dict):
        return {encoded(key): encoded(inner) for key, inner in value.items()}
    return [encoded(each) for each in value]


def holders(found: Any) -> list[list[tuple[str, int, dict[str, int]]]]:
    """Return what a lookup says of the blocks, not of who is alive."""
    return [
        [(each["endpoint"], each["matched_blocks"], each["tiers"]) for each in prompt["endpoints"]]
        for prompt in found["prompts"]
    ]


@pytest.mark.parametrize("version", RECORDED, ids=lambda path: path.name)
def test_the_index_is_read_as_it_was_meant_or_not_at_all(version: Path, tmp_path: Path) -> None:
    """Who changes a key, an encoding or the block keys' formula gives the schema a new prefix (reference/redis.md)."""
    with restored(version, tmp_path, later_ms=HELD_MS) as (server, record):
        for prompt, then in zip(PROMPTS, record["lookups"], strict=True):
            now = lookup(server.url, prompt, tmp_path)
            if record["prefix"] == PREFIX.decode():
                assert holders(now) == holders(then)
                assert any(blocks for each in holders(now) for _, blocks, _ in each)
            else:
                assert not any(blocks for each in holders(now) for _, blocks, _ in each)


@pytest.mark.parametrize("version", RECORDED, ids=lambda path: path.name)
async def test_a_mesh_on_it_serves_and_its_index_becomes_true(version: Path, tmp_path: Path) -> None:
    """The pods have the addresses of then and empty caches: what the record says of them is false, and must go."""
    (tmp_path / "redis").mkdir()
    first = free_port_range(len(PLACES), avoid=())
    pods = tuple(f"127.0.0.1:{first + number}" for number in range(len(PLACES)))
    with restored(version, tmp_path / "redis", addresses=pods) as (server, record):
        flags = ("--redis", server.url, "--sim-port", str(first))
        async with running_stack(tmp_path, *flags, pods=len(PLACES)) as stack:
            assert tuple(stack.ready["endpoints"]) == pods
            answer = await stack.complete(PROMPTS[0])
            assert answer.status == 200
            assert answer.cached_tokens == 0  # whatever was recorded, the pod is a new one
            explained = await stack.indexed(PROMPTS[0], tokens=16)
            assert [each["endpoint"] for each in explained["candidates"] if each["indexed_tokens"]] == [answer.upstream]
            assert (await stack.complete(PROMPTS[0])).upstream == answer.upstream
            await eventually(lambda: asyncio.to_thread(differences, server.url), lambda found: found == "")
            shown = json.loads((version / "pages.json").read_text(encoding="utf-8"))
            now = await pages(stack)
            assert {page: sorted(set(fields) - set(now[page])) for page, fields in shown.items()} == {
                page: [] for page in shown
            }
        if record["prefix"] != PREFIX.decode():
            assert all(server.client().exists(key.encode("latin-1")) for key in record["keys"])  # not ours to delete


def differences(url: str) -> str:
    """Return what `kvmesh index verify` finds wrong, "" for nothing."""
    command = [sys.executable, "-m", "extproc", "index", "verify", "--redis", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else done.stdout + done.stderr

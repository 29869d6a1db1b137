"""Records what this version promises, for the tests of later ones: `python -m tools.record_version [FOLDER]`.

It writes tests/data/versions/<version>: the public surface; the definition of the custom resource, with policies that
the pages show; and, of a real mesh after some requests, what Redis holds, what `kvmesh index lookup` finds in it, and
the fields of the admin pages. Run it at a release, before the tag.
"""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis
import yaml

from extproc.local.service import simulated_tokenizer
from kvmesh import __version__
from kvmesh.redis.keys import PREFIX
from tests.e2e.stack import Stack, eventually, running_stack
from tests.integration.kv_redis import RedisServer
from tools.docs_site import REPOSITORY
from tools.public_surface import definition, fields, shown_policies, surface

VERSIONS = REPOSITORY / "tests" / "data" / "versions"
PROMPTS = [" ".join(f"word{word} of story {story}" for word in range(60)) for story in range(3)]
PLACES = ("POD-A:1", "POD-B:1")  # stand for the pods' addresses, which are free ports of a run
Content = dict[str, Any]


async def recorded_mesh(folder: Path) -> tuple[Content, Content]:
    """Send requests through a mesh; return what Redis holds and a lookup finds there, and the fields of the pages."""
    (folder / "redis").mkdir()
    server = RedisServer(folder / "redis")
    server.start()
    try:
        async with running_stack(folder, "--redis", server.url, pods=len(PLACES)) as stack:
            for prompt in PROMPTS:
                await stack.complete(prompt)
                await stack.indexed(prompt, tokens=16)
            await held_by_both(stack)
            found = [await asyncio.to_thread(lookup, server.url, prompt, folder) for prompt in PROMPTS]
            now = int(time.time() * 1000)
            content = {"at_ms": now, "prefix": PREFIX.decode(), "keys": dump(server.client()), "lookups": found}
            return placed(content, stack), await pages(stack)
    finally:
        server.kill()


async def pages(stack: Stack) -> Content:
    """Return the fields of the admin pages that others read, as they are after some requests."""
    addresses = {"state": f"{stack.ready['admin']}/state", "sources": f"{stack.ready['indexer_admin']}/sources"}
    found = {}
    for name, address in addresses.items():
        async with stack.http.get(address) as response:
            found[name] = sorted(set(fields(await response.json())))
    return found


async def held_by_both(stack: Stack) -> None:
    """Send one prompt to each pod by itself, and wait until the index has it there: blocks of several holders."""
    for pod in stack.ready["endpoints"]:
        await (await stack.http.post(f"http://{pod}/v1/completions", json=body_of(PROMPTS[0]))).read()
    await eventually(
        lambda: stack.explain(body_of(PROMPTS[0])),
        lambda answer: all(candidate["indexed_tokens"] for candidate in answer["candidates"]),
    )


def body_of(prompt: str) -> Content:
    """Return the request of a prompt."""
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2}


def placed(content: Content, stack: Stack) -> Content:
    """Return what does not depend on where it was recorded."""
    text = json.dumps(content).replace(f"{socket.gethostname()}:", "HOST:")
    for place, address in zip(PLACES, stack.ready["endpoints"], strict=True):
        text = text.replace(address, place)
    found: Content = json.loads(text)
    return found


def lookup(url: str, prompt: str, folder: Path) -> Any:
    """Return what `kvmesh index lookup` finds of a prompt: each pod's blocks."""
    body = folder / "lookup.json"
    body.write_text(json.dumps(body_of(prompt)), encoding="utf-8")
    flags = ("--model", "tiny", "--tokenizer", str(simulated_tokenizer()), "--redis", url, "--json", str(body))
    command = [sys.executable, "-m", "extproc", "index", "lookup", *flags]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def dump(client: redis.Redis) -> Content:
    """Return every key with its type and content; bytes as Latin-1, so that text can be read."""
    return {key.decode("latin-1"): _value(client, key) for key in sorted(client.scan_iter(count=1000))}


def _value(client: Any, key: bytes) -> Content:
    kind = client.type(key).decode()
    read = {
        "string": client.get,
        "hash": client.hgetall,
        "set": client.smembers,
        "zset": lambda name: client.zrange(name, 0, -1, withscores=True),
        "stream": client.xrange,
    }[kind]
    return {"type": kind, "value": _text(read(key))}


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, Mapping):
        return {_text(key): _text(inner) for key, inner in sorted(value.items())}
    if isinstance(value, set):
        return sorted(_text(each) for each in value)
    return [_text(each) for each in value] if isinstance(value, list | tuple) else value


def main(folder: Path) -> None:
    """Write the record."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        content, shown = asyncio.run(recorded_mesh(Path(scratch)))
    for name, value in (("surface", surface()), ("redis", content), ("pages", shown)):
        text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True)
        (folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    (folder / "definition.yaml").write_text(yaml.safe_dump(definition(), width=120), encoding="utf-8")
    (folder / "policies.yaml").write_text(yaml.safe_dump_all(shown_policies(), width=120), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else VERSIONS / __version__)

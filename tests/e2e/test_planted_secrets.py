"""Secrets planted in requests and settings are found nowhere that an operator or an observer looks.

One mesh with everything on: debug logs, traces, access log and audit chain to a file and to Redis, token on the admin
pages, password on Redis, a key of the pods, quotas by tenant; every pick traced, every response sampled.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import redis
from aiohttp import web

from extproc.ledger.record_targets import stream_key
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from operate.local.service import simulated_tokenizer
from tests.e2e.planted import Secrets, leaks, token_traces, traces_of
from tests.e2e.stack import Stack, eventually, running_stack
from tests.integration.kv_redis import RedisServer

SECRETS = Secrets()
LOGS = re.compile(r"^logs +(\S+)", re.MULTILINE)
STREAM = "planted-access-log"
BEARER = {"Authorization": f"Bearer {SECRETS.admin_token}"}
CREDENTIALS = {
    "Authorization": f"Bearer {SECRETS.authorization}",
    "X-Api-Key": SECRETS.api_key,
    "Cookie": SECRETS.cookie,
    "X-Forwarded-Access-Token": SECRETS.jwt,
    "X-Gateway-Inference-Fairness-Id": SECRETS.tenant,
}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": f"{SECRETS.system} {SECRETS.system}"},
        {"role": "user", "content": " ".join([SECRETS.prompt] * 12)},
    ],
    "user": SECRETS.end_user,
    "cache_salt": SECRETS.cache_salt,
    "tools": [{"type": "function", "function": {"name": "look", "description": SECRETS.tool}}],
    "max_tokens": 24,
}
STRANGE_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": {"x": SECRETS.prompt}},
    {"role": "user", "content": [{"type": SECRETS.prompt, "text": SECRETS.prompt}]},
    {"role": SECRETS.prompt, "content": SECRETS.prompt},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "x", "arguments": SECRETS.prompt}}]},
    {"role": "user", "content": f"{SECRETS.prompt} \ud800"},
]
PICKER_PAGES = ("/state", "/v1/decisions?limit=100", "/v1/prefixes", "/metrics", "/readyz", "/pools", "/policies")
INDEXER_PAGES = ("/sources", "/metrics", "/readyz")


async def test_no_secret_of_requests_or_settings_is_let_out(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("redis", "up")}
    for folder in folders.values():
        folder.mkdir()
    server = RedisServer(folders["redis"])
    server.start()
    server.client().config_set("requirepass", SECRETS.redis_password)
    try:
        async with collector() as (otlp, spans):
            settings = write_settings(tmp_path, otlp=otlp)
            address = f"redis://:{SECRETS.redis_password}@127.0.0.1:{server.port}/0"
            flags = ("--redis", address, "--log-level", "debug", "--log-format", "json")
            async with running_stack(folders["up"], *flags, settings=settings) as stack:
                generated = await traffic(stack)
                places = await pages(stack) | processes(stack)
                places |= stored(server.port, password=SECRETS.redis_password)
                await eventually(lambda: asyncio.sleep(0, b"".join(spans).count(b"spanId")), lambda count: count >= 5)
                printed = (folders["up"] / "up.log").read_text()
                log_folder = Path(LOGS.findall(printed)[0])
                logs = {f"log {path.name}": path for path in log_folder.glob("*.log")}
                assert len(logs) >= 6, "pods, picker, indexer and Envoy"
                await eventually(lambda: asyncio.sleep(0, lines_of(tmp_path / "access.log")), lambda lines: lines >= 5)
                # the last one: with Redis gone, whoever complains about it must not say how to get in
                server.kill()
                await stack.send("POST", "/v1/chat/completions", json=CHAT, headers=CREDENTIALS)
                places |= {name: path.read_bytes() for name, path in logs.items()}
            places |= {"what kvmesh up prints": (folders["up"] / "up.log").read_bytes()}
            places |= {f"span export {i}": body for i, body in enumerate(spans)}
            places |= {path.name: path.read_bytes() for path in tmp_path.glob("access.log*")}
    finally:
        server.kill()
    assert_was_looked_at(places)
    traces = traces_of(SECRETS.all()) | token_traces("the prompt", prompt_tokens())
    traces |= {"generated text": generated[:24].encode(), "generated JSON": json.dumps(generated[:24])[1:-1].encode()}
    found = leaks(places, traces)
    assert not found, "\n".join(found)


def assert_was_looked_at(places: Mapping[str, bytes]) -> None:
    """Fail where a kind of place says nothing at all of what went on: then nothing could be found there either."""
    for kind, word in {
        "admin /state for token": b'"tiny"',
        "admin /v1/decisions": b'"tiny"',
        "admin /metrics for nobody": b"kvmesh_",
        "indexer_admin /sources for token": b'"endpoint"',
        "admin /state for wrong token": b"token-wrong",
        "explain": b"prompt_tokens",
        "span export": b"spanId",
        "redis key": b"kvmesh",
        "log extproc": b'"level":"debug"',
        "log indexer": b'"level":"debug"',
        "log pod-0": b"{",
        "live": b'"tiny"',
        "access.log": b'"tiny"',
        f"redis key '{stream_key(STREAM).decode()}'": b'"tiny"',
    }.items():
        content = b"".join(said for place, said in places.items() if place.startswith(kind))
        assert word in content, f"{kind} does not say {word!r}: {content[:300]!r}"


def write_settings(folder: Path, *, otlp: str) -> str:
    """Return a settings file with everything on; the files that it names are in `folder`."""
    (folder / "token").write_text(SECRETS.admin_token)
    (folder / "pod-key").write_text(SECRETS.authorization)  # which the clients have, too
    (folder / "audit-key").write_text(f"k1:{SECRETS.audit_key}\n")
    return json.dumps(
        {
            "admin_token_file": str(folder / "token"),
            "pod_key_file": str(folder / "pod-key"),
            "otlp_endpoint": otlp,
            "access_log": ["stdout", str(folder / "access.log"), f"redis:{STREAM}"],
            "audit": True,
            "audit_key_file": str(folder / "audit-key"),
            "sample_share": 1.0,
            "trace_share": 1.0,
            "max_body_bytes": 100_000,
            "index_timeout_ms": 500,
            "policy": {"quotas": [{"tenant": "*", "requestsPerMinute": 60, "burstSeconds": 12}]},
        }
    )


async def traffic(stack: Stack) -> str:
    """Send requests that go well and in every way wrong; return a text that was generated."""
    first = await stack.send("POST", "/v1/chat/completions", json=CHAT, headers=CREDENTIALS)
    assert first.status == 200, first.body
    generated = str(first.json["choices"][0]["message"]["content"])
    assert len(generated.split()) > 3
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"json": CHAT | {"stream": True}}),
        (f"/v1/completions?api_key={SECRETS.query}", {"json": {"model": "tiny", "prompt": SECRETS.prompt * 8}}),
        ("/v1/completions", {"data": f'{{"prompt": "{SECRETS.prompt}'.encode()}),
        ("/v1/chat/completions", {"json": CHAT | {"messages": SECRETS.prompt}}),
        ("/v1/chat/completions", {"json": CHAT | {"max_tokens": SECRETS.prompt}}),
        *[("/v1/chat/completions", {"json": CHAT | {"messages": [each]}}) for each in STRANGE_MESSAGES],
        ("/v1/completions", {"data": (SECRETS.prompt * 9000).encode()}),
        ("/v1/completions", {"json": {"model": "tiny", "prompt": f"{SECRETS.prompt} " * 3000}}),
        (f"/v1/embeddings?key={SECRETS.query}", {"json": {"model": "tiny", "input": SECRETS.prompt}}),
        ("/v1/completions", {"data": b"\xff\xfe" + SECRETS.prompt.encode()}),
        *[("/v1/chat/completions", {"json": CHAT})] * 5,  # beyond the quota
    ]
    statuses = [first.status]
    refusals = {}
    for number, (path, body) in enumerate(wrong):
        answer = await stack.send("POST", path, headers=CREDENTIALS, **body)
        statuses.append(answer.status)
        if "x-kvmesh-reason" in answer.headers:  # the others are the pods' own words
            refusals[f"answer {number} ({answer.status})"] = answer.body
    assert {200, 400, 413, 429} <= set(statuses), statuses
    assert len(refusals) >= 3, refusals
    assert leaks(refusals, traces_of(SECRETS.all())) == [], "what is refused is not repeated"
    await leave_in_the_middle(stack)
    return generated


async def leave_in_the_middle(stack: Stack) -> None:
    """Begin a stream and go."""
    body = CHAT | {"stream": True, "max_tokens": 2000}
    headers = CREDENTIALS | {"X-Gateway-Inference-Fairness-Id": f"{SECRETS.tenant}-2"}
    async with stack.http.post(f"{stack.ready['gateway']}/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.content.readany()


async def pages(stack: Stack) -> dict[str, bytes]:
    """Return all that the admin pages say, with the right token, with a wrong one and with none."""
    found: dict[str, bytes] = {}
    for role, names in (("admin", PICKER_PAGES), ("indexer_admin", INDEXER_PAGES)):
        for name in names:
            for who, headers in (
                ("token", BEARER),
                ("wrong token", {"Authorization": f"Bearer {SECRETS.wrong_token}"}),
                ("nobody", {}),
            ):
                async with stack.http.get(f"{stack.ready[role]}{name}", headers=headers) as answer:
                    found[f"{role} {name} for {who} ({answer.status})"] = await answer.read() + _headers(answer)
    assert [place for place in found if "/state for" in place and "(200)" in place] == ["admin /state for token (200)"]
    headers = CREDENTIALS | BEARER
    async with stack.http.post(f"{stack.ready['admin']}/v1/explain", json=CHAT, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        found["explain"] = await answer.read()
    found["live"] = await live(stack)
    return found


async def live(stack: Stack) -> bytes:
    """Return what the live feed says first, and of one more decision."""
    async with stack.http.get(f"{stack.ready['admin']}/v1/live", headers=BEARER) as answer:
        assert answer.status == 200, await answer.text()
        said = await answer.content.readuntil(b"\n\n")
        later = CREDENTIALS | {"X-Gateway-Inference-Fairness-Id": f"{SECRETS.tenant}-3"}
        await stack.send("POST", "/v1/chat/completions", json=CHAT, headers=later)
        async with asyncio.timeout(15):
            while b"event: ended" not in said or b"event: prefixes" not in said:
                said += await answer.content.readany()
    return said


def _headers(answer: aiohttp.ClientResponse) -> bytes:
    return repr(answer.raw_headers).encode()


def processes(stack: Stack) -> dict[str, bytes]:
    """Return the flags of all processes, which every user of a machine can read."""
    pids = stack.ready["pids"]
    return {f"flags of {name}": Path(f"/proc/{pid}/cmdline").read_bytes() for name, pid in pids.items()}


def stored(port: int, *, password: str | None = None) -> dict[str, bytes]:
    """Return every key of Redis with what it holds, names included."""
    client = redis.Redis(port=port, password=password)
    readers: dict[Any, Any] = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"set": client.smembers,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"stream": client.xrange,
    }
    found = {}
    for key in client.scan_iter(count=1000):
        value = readers[client.type(key)](key)
        parts = [value] if isinstance(value, bytes) else _bytes_in(value)
        found[f"redis key {key.decode('latin-1')!r}"] = b"\n".join([key, *parts])
    assert len(found) > 3
    client.close()
    return found


def _bytes_in(value: Any) -> list[bytes]:
    if isinstance(value, bytes):
        return [value]
    if isinstance(value, dict):
        return [part for pair in value.items() for each in pair for part in _bytes_in(each)]
    return [part for each in value for part in _bytes_in(each)] if isinstance(value, list | tuple | set) else []


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def prompt_tokens() -> list[int]:
    """Return the token ids in the middle of the prompt."""
    body = json.dumps({"model": "tiny", "prompt": " ".join([SECRETS.prompt] * 4)}).encode()
    request = parse_request(path="/v1/completions", body=body)
    (buffer,) = ModelTokenizer.load(simulated_tokenizer()).token_buffers(request, limit=1)
    ids = memoryview(bytes(buffer)).cast("I").tolist()
    return ids[len(ids) // 3 : len(ids) // 3 + 8]


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[bytes]]]:
    """Take what is exported of traces; give the address, and the bodies that came."""
    bodies: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.read() + repr(request.raw_headers).encode())
        return web.json_response({})

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", bodies
    finally:
        await runner.cleanup()


CRASH = """
import sys
import {module} as module
async def crash(*_, **__):
    raise RuntimeError({words!r})
{where} = crash
from operate.cli import main
main()
"""


def test_neither_a_crash_nor_a_refusal_prints_the_settings() -> None:
    good, bad = (f"redis://:{SECRETS.redis_password}@127.0.0.1:{port}/0" for port in (1, 99999))
    picker = ["extproc", "--endpoints=127.0.0.1:1", "--log-level=debug", "--redis"]
    indexer = ["indexer", "--endpoints=127.0.0.1:1", "--model=tiny", "--log-level=debug", "--redis"]
    crashing_picker = CRASH.format(module="extproc.service", where="module.serve", words=SECRETS.prompt)
    crashing_indexer = CRASH.format(
        module="kv_indexer.service", where="module.IndexerService.run", words=SECRETS.prompt
    )
    runs = [
        (["-c", crashing_picker, *picker, good], b"RuntimeError: (its message is left out"),
        (["-c", crashing_indexer, *indexer, good], b"RuntimeError: (its message is left out"),
        (["-m", "operate", *picker, bad], b"--redis"),
    ]
    started = [
        (subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT), said)
        for arguments, said in runs
    ]
    for process, said in started:  # side by side: most of it is Python starting
        output, _ = process.communicate(timeout=90)
        assert said in output, output
        planted = {"password": SECRETS.redis_password, "prompt": SECRETS.prompt}
        assert leaks({str(process.args): output}, traces_of(planted)) == []

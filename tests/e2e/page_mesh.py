"""What a page's commands find on this machine: a mesh, a picker with pools, servers that the page itself starts."""

import asyncio
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from operate.local.service import simulated_tokenizer
from tests.docs_commands.pages import BLOCK
from tests.e2e.pool_documents import inference_pool, mesh_policy, write_documents
from tests.e2e.stack import END_SECONDS, START_SECONDS, Stack, eventually, free_mesh_ports, free_ports
from tests.integration.kv_redis import RedisServer
from tests.integration.kv_tls import make_authority, make_certificate, tls_front
from tools.docs_site import REPOSITORY

POOLS = ("llm/llama", "llm/vllm-llama", "llm/chat")
COMMAND_SECONDS = 60.0
KUBECTL = '#!/bin/sh\necho "kubectl $*"\ncat\n'  # there is no cluster: it prints what it was given
SERVERS = re.compile(r"kvmesh (extproc|indexer|sim|up)\b")
PORTS = {
    "extproc": ("grpc-port", "admin-port"),
    "indexer": ("indexer-admin-port",),
    "sim": ("sim-port",),
    "up": ("port-base",),
}
MOST_PODS = 8  # simulated ones, of a page's `kvmesh up`
MORE = re.compile(r"(?<!\S)…$")  # a line that leaves out what every server needs
READY = {"extproc": "/readyz", "indexer": "/readyz", "sim": "/health"}
REQUEST = {"model": "tiny", "messages": [{"role": "user", "content": "Why is the sea salty?"}]}
WITH_POOLS = {"docs/guides/autoscaling.md", "docs/guides/planning.md", "docs/start/coming-from.md"}
TRACE = REPOSITORY / "bench" / "data" / "mooncake_conversation_cut.jsonl"
EPP_CONFIG = REPOSITORY / "tests" / "data" / "foreign_policies" / "llm_d_prefill_decode.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsPicker:
    """A running picker with pools: its admin address, and the folder that it reads."""

    admin: str
    documents: Path


@dataclass(slots=True, kw_only=True)
class Place:
    """Where the commands of one page run: a folder, and what the page's addresses stand for there."""

    folder: Path
    pods: list[str]
    addresses: dict[str, str]
    servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    assignments: list[str] = field(default_factory=list)

    def as_here(self, line: str) -> str:
        """Return a line with this machine's addresses and files in place of the page's."""
        for theirs, ours in sorted(self.addresses.items(), key=lambda item: -len(item[0])):
            line = line.replace(theirs, ours)
        return line.replace(".venv/bin/", "").removesuffix("&").strip()

    async def run(self, line: str, *, also: str = "") -> str:
        """Run a command to its end and return what it printed; it must succeed."""
        script = "\n".join([*self.assignments, f"set -o pipefail; {self.as_here(line)} {also}"])
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", script),
            cwd=self.folder,
            env=environment(self.folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            printed, _ = await asyncio.wait_for(process.communicate(), COMMAND_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, f"{script}\n{printed.decode()}"
        return printed.decode()

    async def serve(self, line: str, program: str, *, says: str = "") -> None:
        """Start a server, wait until it is ready, and leave it running; later commands ask it.

        Of `kvmesh up` it is `says` that is waited for: its ready file is there a little earlier.
        """
        free = [free_mesh_ports(MOST_PODS)] if program == "up" else free_ports(len(PORTS[program]))
        ports = dict(zip(PORTS[program], free, strict=True))
        flags = [f"--{flag} {port}" for flag, port in ports.items()]
        flags += self._needed(program, line) if MORE.search(line) else []
        flags += ["--no-live"] if program == "up" else []
        line = re.sub(rf"--({'|'.join(PORTS[program])}) \d+", "", self.as_here(line))
        script = "\n".join([*self.assignments, f"exec {MORE.sub('', line)} {' '.join(flags)}"])
        log = self.folder / f"{len(self.servers)}-{program}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", script], cwd=self.folder, env=environment(self.folder), stdout=output, stderr=output
            )
        self.servers[str(log)] = process
        if program == "up":
            await self._until(process, log, partial(has_said, log, says))
            return
        scheme = "https" if "--admin-tls" in line else "http"
        address = f"{scheme}://{'localhost' if scheme == 'https' else '127.0.0.1'}:{list(ports.values())[-1]}"
        await self._until(process, log, partial(is_ready, f"{address}{READY[program]}"))
        if program == "extproc":
            self.addresses |= {"http://127.0.0.1:9090": address, "https://picker:9090": address}
            self.addresses["kvmesh explain"] = f"kvmesh explain --picker {address}"

    def _needed(self, program: str, line: str) -> list[str]:
        pods, model = f"--endpoints {','.join(self.pods)}", "--model tiny"
        tokenizer = f"--tokenizer {shlex.quote(str(simulated_tokenizer()))}"
        redis = [] if "--redis " in line else [f"--redis {self.addresses['redis://…']}"]
        return {"extproc": [pods, model, tokenizer, *redis], "indexer": [pods, model, *redis]}[program]

    async def _until(self, process: subprocess.Popen[bytes], log: Path, is_up: Callable[[], Awaitable[bool]]) -> None:
        async def missing() -> str:
            assert process.poll() is None, log.read_text()
            return "" if await is_up() else f"not ready: {log.read_text()}"

        await eventually(missing, lambda seen: not seen, seconds=START_SECONDS)

    def end(self) -> None:
        """End the servers as their supervisor would; each must go by itself."""
        for process in self.servers.values():
            process.send_signal(signal.SIGTERM)
        codes = {log: _end_of(process) for log, process in self.servers.items()}
        assert set(codes.values()) <= {0, -signal.SIGTERM}, codes


def _end_of(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(END_SECONDS)


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a command: ours come first, and a kubectl that needs no cluster."""
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KVMESH_")}
    return {**ours, "PATH": path, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}


async def has_said(log: Path, text: str) -> bool:
    """Tell whether a program has printed a text."""
    return text in log.read_text()


async def is_ready(url: str) -> bool:
    """Tell whether a page answers 200."""
    try:
        async with aiohttp.ClientSession() as http, http.get(url, ssl=False) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


@asynccontextmanager
async def pools_picker(folder: Path, stack: Stack) -> AsyncIterator[PoolsPicker]:
    """Run a picker that serves the pools of the pages, with a policy that names a role to scale."""
    documents = folder / "mesh"
    documents.mkdir()
    ports = [int(pod.rpartition(":")[2]) for pod in stack.ready["endpoints"]]
    pools = [
        document
        for pool, port in zip(POOLS, [*ports, *ports], strict=False)
        for document in inference_pool(pool, port=port, ips=["127.0.0.1"])
    ]
    write_documents(documents, "pools", *pools)
    scaled = policies("docs/guides/autoscaling.md")[0]
    scaled["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    write_documents(documents, "policies", mesh_policy(), scaled)
    place = Place(folder=folder, pods=[], addresses={"redis://…": stack.ready["redis"]})
    try:
        await place.serve("kvmesh extproc --policies ./mesh --redis redis://…", "extproc")
        yield PoolsPicker(admin=place.addresses["http://127.0.0.1:9090"], documents=documents)
    finally:
        place.end()


@asynccontextmanager
async def place_of(page: str, folder: Path, *, stack: Stack, pools: PoolsPicker) -> AsyncIterator[Place]:
    """Yield a place for a page's commands; afterwards nothing of it runs any more."""
    ready = stack.ready
    picker = pools.admin if page in WITH_POOLS else ready["admin"]
    tiny = shlex.quote(str(simulated_tokenizer()))
    addresses = {
        "http://127.0.0.1:9090": picker,
        "http://localhost:9090": picker,
        "http://picker:9090": f"{picker} --grpc-port {ready['extproc'].rpartition(':')[2]}",
        "https://picker-0:9090": pools.admin,
        "https://picker-1:9090": pools.admin,
        "http://indexer:9091": ready["indexer_admin"],
        "http://127.0.0.1:9901": ready["envoy_admin"],
        "redis://redis:6379/0": ready["redis"],
        "redis://…": ready["redis"],
        "10.0.0.1:8000": ready["endpoints"][0],
        "10.0.0.2:8000": ready["endpoints"][1],
        "/models/qwen": tiny,
        "--model qwen": "--model tiny",
        "./MODEL-tokenizer": tiny,
        "--model MODEL": "--model tiny",
        "kvmesh explain": f"kvmesh explain --picker {picker}",
        "kvmesh plan": f"kvmesh plan --picker {picker}",
        "kvmesh top": "kvmesh top --once" + ("" if page == "docs/guides/top.md" else f" --picker {picker}"),
        "bench/": shlex.quote(f"{REPOSITORY}/bench/"),
    }
    put_files(page, folder, pools.documents)
    place = Place(folder=folder, pods=ready["endpoints"], addresses=addresses)
    try:
        yield place
    finally:
        place.end()


def put_files(page: str, folder: Path, documents: Path) -> None:
    """Put the files there that the page's commands read."""
    (folder / "bin").mkdir()
    (folder / "bin" / "kubectl").write_text(KUBECTL)
    (folder / "bin" / "kubectl").chmod(0o755)
    (folder / "request.json").write_text(json.dumps(REQUEST))
    shutil.copy(TRACE, folder / "requests.jsonl")
    shutil.copy(EPP_CONFIG, folder / "epp.yaml")
    shutil.copytree(documents, folder / "mesh")
    if page != "docs/guides/admin-access.md":  # which makes it
        (folder / "admin-token").write_text(secrets.token_hex(16))
    (folder / "token").write_text(secrets.token_hex(16))
    make_authority(folder, "ca")
    for policy in policies(page)[:1]:
        (folder / "policy.yaml").write_text(yaml.safe_dump(policy))


def put_certificates(folder: Path) -> None:
    """Put the certificates there that admin-access.md names: one authority for servers, one for clients."""
    made = folder / "made"
    made.mkdir()
    for authority, holder, name in (("servers", "localhost", "tls"), ("clients", "me", "me")):
        signing = make_authority(made, authority)
        given = make_certificate(made, holder, authority=signing)
        shutil.copy(signing.cert, folder / f"{authority}.crt")
        shutil.copy(given.cert, folder / f"{name}.crt")
        shutil.copy(given.key, folder / f"{name}.key")


def policies(page: str) -> list[dict[str, Any]]:
    """Return the InferencePolicies that a page shows."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    blocks = [match[3] for match in BLOCK.finditer(text) if match[2] == "yaml"]
    documents = [each for block in blocks for each in yaml.safe_load_all(textwrap.dedent(block))]
    return [each for each in documents if isinstance(each, dict) and each.get("kind") == "InferencePolicy"]


async def write_audit(place: Place) -> None:
    """Have a picker write what audit.md reads: a chained access log, and a stream in Redis."""
    (place.folder / "keys").write_text(f"first:{secrets.token_hex(16)}\n")
    flags = "--access-log audit.log,redis:NAME --audit --audit-key-file keys"
    await place.serve(f"kvmesh extproc {flags} …", "extproc")


@asynccontextmanager
async def redis_of_the_page(folder: Path, addresses: dict[str, str]) -> AsyncIterator[None]:
    """Run a Redis with the one user of redis-connection.md and the rights that it gives, also on a socket."""
    text = (REPOSITORY / "docs/guides/redis-connection.md").read_text(encoding="utf-8")
    (rights,) = [match[3] for match in BLOCK.finditer(text) if match[2] == "redis"]
    password = secrets.token_hex(8)
    (folder / "password").write_text(password)
    server = RedisServer(folder, "--unixsocket", str(folder / "redis.sock"))
    server.start()
    try:
        client: Any = server.client()
        client.execute_command(*rights.replace("PASSWORD", password).split())
        client.execute_command("ACL", "SETUSER", "default", "off")
        authority = make_authority(folder, "ca")
        ours, theirs = (make_certificate(folder, name, authority=authority) for name in ("me", "localhost"))
        async with tls_front(server.port, certificate=theirs, clients=authority) as tls:
            user = f"username=kvmesh&password_file={folder / 'password'}"
            addresses |= {
                "redis://10.0.0.5:6379/0": server.url,
                "/secrets/redis": str(folder / "password"),
                "rediss://redis.example:6380/0?": f"rediss://localhost:{tls}/0?{user}&",
                "/tls/ca.pem": str(authority.cert),
                "/tls/me.pem": str(ours.cert),
                "/tls/me.key": str(ours.key),
                "unix:///run/redis.sock?db=2": f"'unix://{folder / 'redis.sock'}?db=2&{user}'",
            }
            yield
    finally:
        server.kill()

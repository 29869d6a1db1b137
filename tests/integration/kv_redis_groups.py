"""Real redis-servers that belong together: a master, its replica and three Sentinels; a cluster with one replica."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from kvmesh.redis.keys import KEY_SLOT
from tests.integration.kv_redis import RedisServer, redis_program

DEADLINE_SECONDS = 30.0
SLOTS = 16384
# what docs/guides/redis-connection.md tells operators to grant
RIGHTS = ("~{kv2}*", "+@all", "-@admin", "-@dangerous", "+info", "+role", "+client|tracking")


async def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Return the condition's first true answer; a server that refuses counts as false."""
    deadline, last = time.monotonic() + DEADLINE_SECONDS, ""
    while True:
        try:
            if answer := condition():
                return answer
        except redis.RedisError as error:
            last = str(error)
        assert time.monotonic() < deadline, f"not in time: {what} {last}"
        await asyncio.sleep(0.02)


class SentinelServer(RedisServer):
    """A Sentinel; it keeps what it learns in its configuration file."""

    def __init__(self, folder: Path, config: str) -> None:
        super().__init__(folder)
        self._config = folder / "sentinel.conf"
        self._config.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {folder}\n{config}")

    def start(self) -> None:
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(redis_program()), str(self._config), "--sentinel"], stdout=log, stderr=log
            )
        self._until_it_answers()

    def _until_it_answers(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                self.client().ping()
                return
            except redis.AuthenticationError:
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, (self._folder / "redis.log").read_text()
                time.sleep(0.01)


class ServerGroup:
    """Servers that are ended together, each with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.servers: list[RedisServer] = []
        self._folder = folder

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def _folder_of_next(self) -> Path:
        folder = self._folder / f"server-{len(self.servers)}"
        folder.mkdir()
        return folder

    def _start(self, server: RedisServer) -> RedisServer:
        self.servers.append(server)
        server.start()
        return server


class SentinelGroup(ServerGroup):
    """A master, its replica, and three Sentinels that fail over after 0.3 s."""

    name = "the-index"

    def __init__(self, folder: Path, *, sentinel_options: str = "") -> None:
        super().__init__(folder)
        self.first = self._start(RedisServer(self._folder_of_next()))
        self.second = self._start(RedisServer(self._folder_of_next(), "--replicaof", "127.0.0.1", str(self.first.port)))
        config = (
            f"sentinel monitor {self.name} 127.0.0.1 {self.first.port} 2\n"
            f"sentinel down-after-milliseconds {self.name} 300\n"
            f"sentinel failover-timeout {self.name} 2000\n{sentinel_options}"
        )
        self.sentinels = [self._start(SentinelServer(self._folder_of_next(), config)) for _ in range(3)]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in self.sentinels)}/{self.name}/0"

    async def formed(self) -> None:
        """Wait until the replica has copied and the Sentinels know it and each other."""
        await eventually(lambda: self.second.client().info("replication")["master_link_status"] == "up", "a copy")
        for sentinel in self.sentinels:
            await eventually(lambda one=sentinel: self._knows(one) == (1, 2), "Sentinels that know all")  # type: ignore[misc]

    def _knows(self, sentinel: RedisServer) -> tuple[int, int]:
        client: Any = sentinel.client()
        facts = client.sentinel_master(self.name)
        return facts["num-slaves"], facts["num-other-sentinels"]


class ClusterGroup(ServerGroup):
    """Three masters with a third of the slots each, and a replica of the one that has the index's slot."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        options = (
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "500",
            "--cluster-replica-validity-factor",
            "0",
        )
        self.masters = [self._start(RedisServer(self._folder_of_next(), *options)) for _ in range(3)]
        self.replica = self._start(RedisServer(self._folder_of_next(), *options))
        third = SLOTS // 3 + 1
        self.owner = self.masters[KEY_SLOT // third]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{one.port}' for one in self.servers)}"

    async def formed(self) -> None:
        """Introduce the nodes to each other, share out the slots and wait until all is well."""
        third = SLOTS // 3 + 1
        for number, master in enumerate(self.masters):
            command(master, "CLUSTER", "ADDSLOTS", *range(SLOTS)[number * third : (number + 1) * third])
            command(master, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            command(server, "CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        for server in self.servers:
            await eventually(lambda one=server: self._is_well(one), "a cluster")  # type: ignore[misc]
        command(self.replica, "CLUSTER", "REPLICATE", self.id_of(self.owner))
        await eventually(lambda: self.replica.client().info("replication")["master_link_status"] == "up", "a copy")
        for server in self.servers:
            await eventually(lambda one=server: b"slave " in _nodes(one), "a known replica")  # type: ignore[misc]

    def id_of(self, server: RedisServer) -> str:
        return str(command(server, "CLUSTER", "MYID").decode())

    def _is_well(self, server: RedisServer) -> bool:
        facts = command(server, "CLUSTER", "INFO").decode().split()
        return {"cluster_state:ok", f"cluster_known_nodes:{len(self.servers)}"} <= set(facts)


def command(server: RedisServer, *words: str | int) -> Any:
    """Run a command on exactly this server."""
    client: Any = server.client()
    return client.execute_command(*words)


def _nodes(server: RedisServer) -> bytes:
    nodes: bytes = command(server, "CLUSTER", "NODES")
    return nodes

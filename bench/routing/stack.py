"""Everything that runs for one arm: pods, and what spreads the load over them; started fresh, ended completely."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.redis_server import redis_program
from bench.routing.arms import Arm, Kind
from bench.routing.children import Children
from bench.routing.envoy_files import with_pickers, without_picker
from bench.routing.peers import peers_folder
from bench.routing.plan import PodSettings
from bench.routing.subject import HERE, Subject
from operate.local.envoy_config import SocketAddress
from operate.local.ports import pick_free_port
from operate.local.processes import GrpcReady, HttpReady, RedisReady, find_envoy
from podsim.model_folder import TINY_MODEL

HOST = "127.0.0.1"
MODEL = "tiny"


class Ports:
    """Free ports, none of them twice in the life of this object."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self) -> SocketAddress:
        """One more."""
        port = pick_free_port(host=HOST, avoid=self._taken)
        self._taken.add(port)
        return SocketAddress(host=HOST, port=port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running arm."""

    gateways: tuple[SocketAddress, ...]  # clients take them in turn
    pods: tuple[SocketAddress, ...]
    pod_flags: tuple[str, ...]
    children: Children

    async def restart_pod(self, number: int, *, after_seconds: float) -> None:
        """Kill a pod; it comes back empty at the same address."""
        await self.children.kill(f"pod-{number}")
        await asyncio.sleep(after_seconds)
        await start_pod(self.children, number, self.pods[number], self.pod_flags)
        await self.children.until_ready(f"pod-{number}", HttpReady(url=f"http://{self.pods[number]}/health"))


async def start_pod(children: Children, number: int, address: SocketAddress, settings: Sequence[str]) -> None:
    """Start one simulated pod, always the bench's own.

    It gives way to all others: real pods run on other machines, and keep no router from a core.
    """
    program = ("nice", "-n", "5", sys.executable, "-m", "bench.routing.quick_pod")
    flags = ("--host", address.host, "--sim-port", str(address.port), "--model", MODEL)
    await children.start(f"pod-{number}", (*program, *flags, *settings), cwd=HERE)


@asynccontextmanager
async def running_arm(
    arm: Arm, *, subject: Subject, settings: PodSettings, routers: int, directory: Path
) -> AsyncIterator[Stack]:
    """Start the arm with so many replicas of its router; leaving ends all of it."""
    children, ports = Children(directory), Ports()
    pods = tuple(ports.take() for _ in range(settings.pods))
    pod_flags = settings.flags(render=arm.peer is not None and arm.peer.needs_render)
    try:
        for number, pod in enumerate(pods):
            await start_pod(children, number, pod, pod_flags)
        starting = _Starting(arm=arm, subject=subject, pods=pods, children=children, ports=ports, directory=directory)
        for number, pod in enumerate(pods):
            await children.until_ready(f"pod-{number}", HttpReady(url=f"http://{pod}/health"))
        gateways = await starting.routers(routers)
        yield Stack(gateways=gateways, pods=pods, pod_flags=pod_flags, children=children)
    finally:
        await children.end_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starting:
    """What the steps of a start share."""

    arm: Arm
    subject: Subject
    pods: tuple[SocketAddress, ...]
    children: Children
    ports: Ports
    directory: Path

    async def routers(self, count: int) -> tuple[SocketAddress, ...]:
        """Start what stands before the pods; return where clients connect."""
        if self.arm.kind is Kind.PEER:
            return tuple([await self._peer(number) for number in range(count)])
        gateway, admin = self.ports.take(), self.ports.take()
        template = self.subject.envoy_template()
        if self.arm.kind is Kind.PLAIN:
            assert self.arm.balancing is not None
            config = without_picker(
                template, gateway=gateway, admin=admin, balancing=self.arm.balancing, pods=self.pods
            )
        else:
            pickers = await self._pickers(count)
            config = with_pickers(template, gateway=gateway, admin=admin, pickers=pickers, pods=self.pods)
        file = self.directory / "envoy.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        flags = ("--log-level", "warning", "--disable-hot-restart", "--concurrency", "2")
        await self.children.start("envoy", (str(find_envoy()), "-c", str(file), *flags))
        await self.children.until_ready("envoy", HttpReady(url=f"http://{admin}/ready"))
        return (gateway,)

    async def _pickers(self, count: int) -> tuple[SocketAddress, ...]:
        redis = f"unix://{await self._redis()}"
        indexer_admin = self.ports.take()
        common = ("--redis", redis, "--endpoints", ",".join(str(pod) for pod in self.pods), "--model", MODEL)
        quiet = ("--log-level", "warning")
        await self.children.start(
            "indexer",
            self.subject.command(
                *("indexer", "--host", HOST, "--indexer-admin-port", str(indexer_admin.port)), *common, *quiet
            ),
            cwd=self.subject.checkout,
        )
        addresses = [(self.ports.take(), self.ports.take()) for _ in range(count)]
        for number, (grpc, admin) in enumerate(addresses):
            await self.children.start(
                f"picker-{number}",
                self.subject.command(
                    *("extproc", "--host", HOST, "--grpc-port", str(grpc.port), "--admin-port", str(admin.port)),
                    *common,
                    *("--tokenizer", str(TINY_MODEL), "--drain-seconds", "0"),
                    *self._policy_flags(),
                    *self.arm.picker_flags,
                    *quiet,
                ),
                cwd=self.subject.checkout,
            )
        await self.children.until_ready("indexer", HttpReady(url=f"http://{indexer_admin}/readyz"))
        for number, (grpc, admin) in enumerate(addresses):
            await self.children.until_ready(f"picker-{number}", HttpReady(url=f"http://{admin}/readyz"))
            await self.children.until_ready(f"picker-{number}", GrpcReady(address=str(grpc)))
        return tuple(grpc for grpc, _ in addresses)

    def _policy_flags(self) -> tuple[str, ...]:
        if self.arm.policy is None:
            return ()
        file = self.directory / "policy.yaml"
        file.write_text(json.dumps(self.subject.policy_document(self.arm.policy)), encoding="utf-8")  # JSON is YAML
        return ("--policy", str(file))

    async def _redis(self) -> Path:
        socket = self.directory / "redis.sock"
        flags = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(self.directory))
        await self.children.start("redis", (str(redis_program()), *flags))
        await self.children.until_ready("redis", RedisReady(url=f"unix://{socket}"))
        return socket

    async def _peer(self, number: int) -> SocketAddress:
        peer = self.arm.peer
        assert peer is not None
        address, metrics = self.ports.take(), self.ports.take()
        command = peer.command(
            peers_folder() / "bin", address.port, metrics.port, [str(pod) for pod in self.pods], TINY_MODEL
        )
        name = f"{peer.name}-{number}"
        await self.children.start(name, command, environment=peer.environment(TINY_MODEL))
        await self.children.until_ready(name, HttpReady(url=f"http://{address}{peer.ready_path}"))
        return address

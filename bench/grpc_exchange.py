"""The server's CPU time for one ext_proc exchange, by gRPC server: `python -m bench.grpc_exchange`.

A scripted client plays Envoy's part (headers, body, its end; the answers; response headers) against `bench.bare_picker`
in a process of its own, once for each configuration, all alive at the same time and measured in turn. Results and the
decision: docs/decisions/0002-grpc-transport.md.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from bench.calibration import loop_ns_per_iteration
from bench.cpu_time import process_cpu_ms
from extproc.ext_proc.answers import PROCESSOR_SERVICE
from extproc.ext_proc.exchange import BODY_CHUNK_BYTES, BodyMode
from extproc.ext_proc.grpc_tls import make_self_signed
from operate.local.errors import UpError
from operate.local.ports import pick_free_port
from operate.local.processes import GrpcReady, ProcessSpec, Supervisor

HOST = "127.0.0.1"
PODS = "10.0.0.1:8000,10.0.0.2:8000,10.0.0.3:8000"
EXCHANGE_SECONDS = 20.0
LIMIT_SECONDS = 200.0
WARM_UP_REQUESTS = 100
CERTIFIED = "kvmesh-picker"
HEADERS = {
    ":method": "POST",
    ":path": "/v1/chat/completions",
    ":authority": "gateway.example",
    ":scheme": "http",
    "content-type": "application/json",
    "user-agent": "bench",
    "x-forwarded-proto": "http",
    "x-request-id": "2c6ad1cb-23cb-4bcb-8d7a-0e3d7a8b6b6d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One configuration of the server."""

    name: str
    server: str
    loop: str
    experiments: str = ""  # GRPC_EXPERIMENTS; empty: grpc's own defaults
    has_tls: bool = False


# One thread polls instead of a pool that hands every event on: the cheapest that grpc.aio can be.
LEAN_GRPC = ",".join(
    f"-{experiment}"
    for experiment in (
        "event_engine_listener",
        "event_engine_client",
        "event_engine_for_all_other_endpoints",
        "event_engine_callback_cq",
    )
)
SETUPS = (  # the product's first
    Setup(name="own server, uvloop", server="own", loop="uvloop"),
    Setup(name="own server, uvloop, TLS", server="own", loop="uvloop", has_tls=True),
    Setup(name="own server, asyncio", server="own", loop="asyncio"),
    Setup(name="grpc.aio, uvloop, experiments off", server="grpcio", loop="uvloop", experiments=LEAN_GRPC),
    Setup(name="grpc.aio, uvloop, its defaults", server="grpcio", loop="uvloop"),
    Setup(name="grpc.aio, uvloop, its defaults, TLS", server="grpcio", loop="uvloop", has_tls=True),
    Setup(name="grpc.aio, asyncio, its defaults", server="grpcio", loop="asyncio"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What Envoy sends in one exchange, encoded, and how many answers come before the response headers."""

    request: tuple[bytes, ...]
    answers: int
    response: bytes

    @classmethod
    def for_body(cls, size_bytes: int) -> "Script":
        """FULL_DUPLEX_STREAMED: headers, the body, an empty last piece."""
        headers, body = ProcessingRequest(), ProcessingRequest()
        for key, value in HEADERS.items():
            headers.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        headers.protocol_config.request_body_mode = BodyMode.FULL_DUPLEX_STREAMED
        body.request_body.body = b"x" * size_bytes
        end, response = ProcessingRequest(), ProcessingRequest()
        end.request_body.end_of_stream = True
        response.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        request = tuple(message.SerializeToString() for message in (headers, body, end))
        return cls(
            request=request,
            answers=1 + -(-size_bytes // BODY_CHUNK_BYTES),
            response=response.SerializeToString(),
        )


class Client:
    """Envoy's part, on one connection."""

    def __init__(self, address: str, script: Script, *, trusted: bytes | None) -> None:
        if trusted is None:
            self._channel = grpc.aio.insecure_channel(address)
        else:
            name = (("grpc.ssl_target_name_override", CERTIFIED),)
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted), options=name)
        self._call = self._channel.stream_stream(f"/{PROCESSOR_SERVICE}/Process")
        self._script = script

    async def send(self, count: int, *, concurrency: int) -> None:
        """`count` exchanges, `concurrency` at a time."""
        left = iter(range(count))

        async def work() -> None:
            for _ in left:
                async with asyncio.timeout(EXCHANGE_SECONDS):
                    await self._exchange()

        async with asyncio.TaskGroup() as workers:
            for number in range(concurrency):
                workers.create_task(work(), name=f"worker {number}")

    async def _exchange(self) -> None:
        call = self._call(wait_for_ready=True)
        for message in self._script.request:
            await call.write(message)
        for _ in range(self._script.answers):
            await call.read()
        await call.write(self._script.response)
        await call.read()
        await call.done_writing()
        if await call.read() is not grpc.aio.EOF:
            raise RuntimeError("the server answered more than the script expects")

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """CPU milliseconds an exchange: concurrency -> configuration -> one number a round."""
    costs: dict[int, dict[str, list[float]]] = {}
    loop_ns = [loop_ns_per_iteration()]
    ports: list[int] = []
    for _ in SETUPS:
        ports.append(pick_free_port(host=HOST, avoid=ports))
    addresses = {setup.name: f"{HOST}:{port}" for setup, port in zip(SETUPS, ports, strict=True)}
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as directory:
        supervisor = Supervisor(log_directory=Path(directory))
        pair = Path(directory, "pair.pem")
        made = make_self_signed(CERTIFIED, names=[CERTIFIED], flag="the benchmark", instead="nothing")
        trusted = made.cert
        pair.write_bytes(made.key + made.cert)

        async def when_ready() -> None:
            script = Script.for_body(options.body_bytes)
            clients = {
                setup.name: Client(addresses[setup.name], script, trusted=trusted if setup.has_tls else None)
                for setup in SETUPS
            }
            for client in clients.values():
                await client.send(WARM_UP_REQUESTS, concurrency=16)
            for concurrency in options.concurrency:
                for _ in range(options.rounds):
                    for name, client in clients.items():
                        before = process_cpu_ms(supervisor.pids[name])
                        await client.send(options.requests, concurrency=concurrency)
                        cost = (process_cpu_ms(supervisor.pids[name]) - before) / options.requests
                        costs.setdefault(concurrency, {}).setdefault(name, []).append(cost)
                    loop_ns.append(loop_ns_per_iteration())
            for client in clients.values():
                await client.close()

        stage = [_server(setup, addresses[setup.name], pair) for setup in SETUPS]
        async with asyncio.timeout(LIMIT_SECONDS):
            await supervisor.run([stage], environment=os.environ, when_ready=when_ready)
    return {"cpu_ms_per_exchange": costs, "loop_ns_per_iteration": loop_ns}


def _server(setup: Setup, address: str, pair: Path) -> ProcessSpec:
    tls = ("--tls-cert", str(pair)) if setup.has_tls else ()
    return ProcessSpec(
        name=setup.name,
        argv=(
            *("env", f"GRPC_EXPERIMENTS={setup.experiments}"),  # `env` becomes the server: the process id stays
            *(sys.executable, "-m", "bench.bare_picker"),
            *("--port", address.rpartition(":")[2], "--pods", PODS, "--loop", setup.loop, "--server", setup.server),
            *tls,
        ),
        ready=() if setup.has_tls else (GrpcReady(address=address),),  # its client waits for it
    )


def table(result: Mapping[str, Any]) -> str:
    """Median and range of the rounds, and the median ratio to the product's configuration in the same round."""
    lines = [f"{'CPU ms an exchange':52}{'median':>8}{'least':>8}{'greatest':>10}{'ratio':>8}"]
    for concurrency, by_setup in result["cpu_ms_per_exchange"].items():
        ours = by_setup[SETUPS[0].name]
        for name, costs in by_setup.items():
            ratio = statistics.median(cost / base for cost, base in zip(costs, ours, strict=True))
            numbers = f"{statistics.median(costs):8.2f}{min(costs):8.2f}{max(costs):10.2f}{ratio:8.2f}"
            lines.append(f"{f'{name}, concurrency {concurrency}':52}{numbers}")
    loop_ns = result["loop_ns_per_iteration"]
    lines.append(
        f"calibration loop: {statistics.median(loop_ns):.0f} ns an iteration ({min(loop_ns):.0f}..{max(loop_ns):.0f})"
    )
    return "\n".join(lines)


def main() -> None:
    """Parse the flags, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--requests", type=int, default=150, help="exchanges a round and configuration")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--body-bytes", type=int, default=8000)
    parser.add_argument("--json", action="store_true", help="every round as JSON instead of the table")
    options = parser.parse_args()
    try:
        result = uvloop.run(measure(options))
    except KeyboardInterrupt:
        sys.exit("interrupted: the servers have ended")
    except TimeoutError:
        sys.exit(f"not done within {LIMIT_SECONDS:g} s, or an exchange took more than {EXCHANGE_SECONDS:g} s")
    except UpError as error:
        sys.exit("\n".join((error.message, *error.log_lines)))
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()

"""Do several pickers balance as one? `python -m bench.replicas [--rounds 3] [--seconds 10] [--rate 20]`.

The same arrivals with the same service times are sent through one picker, through three over one Redis, and through
three that do not know of each other (each on a database of its own), in turn. A scripted client plays Envoy: it holds
each ext_proc exchange open until the simulated pod has served the request. The pickers are real processes. What counts
is how far the fullest pod is above the mean, averaged over time: docs/explanation/replicas.md. A machine that is too
busy to send in time (`late ms`) measures itself.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import uvloop
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from bench.cpu_time import process_cpu_ms
from bench.machine import machine
from bench.redis_server import start_redis, stop_redis
from bench.replica_pods import HOST, SimulatedPods
from extproc.ext_proc.answers import PROCESSOR_SERVICE
from extproc.ext_proc.exchange import BodyMode
from operate.local.errors import UpError
from operate.local.ports import pick_free_port
from operate.local.processes import GrpcReady, ProcessSpec, Supervisor

TOKENIZER = Path(__file__).parents[1] / "podsim" / "tiny_model"
DESTINATION = "x-gateway-destination-endpoint"
WARM_UP_SHARE = 0.25  # of a run, until the pods are as full as they get
LIMIT_SECONDS = 180.0  # for one run
ATTEMPTS = 3  # to start the pickers


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What comes, the same in every run."""

    pods: int = 6
    requests_per_second: float = 20.0
    seconds: float = 10.0
    mean_service_seconds: float = 1.0
    prompt_words: int = 60
    seed: int = 4

    def arrivals(self) -> list[tuple[float, float, bytes]]:
        """Return (second, seconds of service, body) of every request; no two prompts begin alike."""
        dice = random.Random(self.seed)
        found, at = [], 0.0
        while (at := at + dice.expovariate(self.requests_per_second)) < self.seconds:
            service = dice.lognormvariate(-0.32, 0.8) * self.mean_service_seconds  # mean 1, p99 about 5
            words = " ".join(str(dice.randrange(10_000)) for _ in range(self.prompt_words))
            body = {"model": "tiny", "prompt": words, "max_tokens": 100, "stream": True}
            found.append((at, service, json.dumps(body).encode()))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Pickers, and whether they have one Redis database together."""

    name: str
    pickers: int
    shared: bool = True


SETUPS = (
    Setup(name="one picker", pickers=1),
    Setup(name="three pickers, one Redis", pickers=3),
    Setup(name="three pickers, a Redis each", pickers=3, shared=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run showed."""

    imbalance: float  # the fullest pod above the mean, averaged over time: 0.1 is 10 %
    in_flight: float  # requests a pod, averaged over time
    requests: int
    failed: int
    picker_cpu_ms: float  # a request, all pickers together
    late_ms: float  # p99 of how late this process was to send: more than some 50, and the run says little


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickers:
    """What runs: the pickers' addresses for Envoy, their processes, and the Redis of the first one."""

    addresses: tuple[str, ...]
    pids: Mapping[str, int]
    redis_url: str


async def with_pickers(
    setup: Setup, pods: SimulatedPods, work: Callable[[Pickers], Awaitable[None]], *, flags: Sequence[str] = ()
) -> None:
    """Start Redis, pods and pickers, do the work, end all. Raise UpError where a process does not start or ends."""
    begun = False

    async def begin(pickers: Pickers) -> None:
        nonlocal begun
        begun = True
        await work(pickers)

    try:
        await pods.start()
        for attempt in range(ATTEMPTS):
            try:
                return await _with_pickers(setup, pods, begin, flags=flags)
            except UpError:  # on a busy machine somebody may have taken a port that was free just now
                if begun or attempt == ATTEMPTS - 1:
                    raise
    finally:
        await pods.close()


async def _with_pickers(
    setup: Setup, pods: SimulatedPods, work: Callable[[Pickers], Awaitable[None]], *, flags: Sequence[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as directory:
        redis, redis_url = start_redis(directory)
        supervisor = Supervisor(log_directory=Path(directory))
        ports: list[int] = []
        while len(ports) < 2 * setup.pickers:
            ports.append(pick_free_port(host=HOST, avoid=ports))
        specs = [
            _picker(number, pods, redis_url, ports=(ports[2 * number], ports[2 * number + 1]), setup=setup, flags=flags)
            for number in range(setup.pickers)
        ]
        addresses = tuple(f"{HOST}:{port}" for port in ports[::2])

        async def when_ready() -> None:
            await work(Pickers(addresses=addresses, pids=supervisor.pids, redis_url=f"{redis_url}?db=0"))

        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await supervisor.run([specs], environment=os.environ, when_ready=when_ready)
        finally:
            stop_redis(redis)


async def run_setup(setup: Setup, load: Load, *, flags: Sequence[str] = ()) -> Outcome:
    """Send the load through a setup that is started for it. Raise UpError where a process does not start."""
    pods = SimulatedPods(load.pods, clock=asyncio.get_running_loop().time)
    outcomes: list[Outcome] = []

    async def work(pickers: Pickers) -> None:
        outcomes.append(await _measure(load, pods, pickers))

    await with_pickers(setup, pods, work, flags=flags)
    return outcomes[0]


def _picker(
    number: int, pods: SimulatedPods, redis: str, *, ports: tuple[int, int], setup: Setup, flags: Sequence[str]
) -> ProcessSpec:
    settings = {
        "host": HOST,
        "grpc-port": ports[0],
        "admin-port": ports[1],
        "redis": f"{redis}?db={0 if setup.shared else number}",
        "endpoints": ",".join(pods.by_address),
        "model": "tiny",
        "tokenizer": TOKENIZER,
        "drain-seconds": 0,
    }
    given = [f"--{name}={value}" for name, value in settings.items()]
    return ProcessSpec(
        name=f"picker-{number}",
        argv=(sys.executable, "-m", "operate", "extproc", *given, *flags),
        ready=(GrpcReady(address=f"{HOST}:{ports[0]}"),),
    )


async def _measure(load: Load, pods: SimulatedPods, pickers: Pickers) -> Outcome:
    loop = asyncio.get_running_loop()
    clients = [Envoy(address, pods) for address in pickers.addresses]
    turns = itertools.cycle(clients)  # Envoys choose their picker without looking, here in turn
    arrivals = load.arrivals()
    cpu_before = sum(map(process_cpu_ms, pickers.pids.values()))
    loop.call_later(load.seconds * WARM_UP_SHARE, pods.begin)
    started = loop.time()
    late: list[float] = []
    imbalance, in_flight = 0.0, 0.0
    async with asyncio.TaskGroup() as requests:
        for number, (at, service, body) in enumerate(arrivals):
            await asyncio.sleep(max(started + at - loop.time(), 0.0))
            late.append(loop.time() - started - at)
            requests.create_task(next(turns).exchange(body, seconds=service), name=f"request {number}")
        imbalance, in_flight = pods.imbalance()  # not of the time in which the last ones end
    cpu = sum(map(process_cpu_ms, pickers.pids.values())) - cpu_before
    for client in clients:
        await client.close()
    return Outcome(
        imbalance=imbalance,
        in_flight=in_flight,
        requests=len(arrivals),
        failed=sum(client.failed for client in clients),
        picker_cpu_ms=cpu / len(arrivals),
        late_ms=statistics.quantiles(late, n=100)[98] * 1000,
    )


class Envoy:
    """Envoy's part towards one picker: the exchange, and the pod that it is told."""

    def __init__(self, address: str, pods: SimulatedPods) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._call = self._channel.stream_stream(
            f"/{PROCESSOR_SERVICE}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        self._pods = pods
        self.failed = 0

    async def exchange(self, body: bytes, *, seconds: float) -> None:
        """Send one request through; it takes a pod `seconds`."""
        call = self._call()
        for message in request_messages(body):
            await call.write(message)
        answers = [await call.read() for _ in range(2)]
        endpoint = next((found for answer in answers if (found := destination_of(answer))), None)
        if endpoint is None:
            self.failed += 1
            call.cancel()
            return

        async def answers_begin() -> None:
            await call.write(response_message(endpoint))
            await call.read()

        self._pods.change(endpoint, by=1)
        try:
            await self._pods.by_address[endpoint].serve(seconds, answers=answers_begin)
        finally:
            self._pods.change(endpoint, by=-1)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


def request_messages(body: bytes) -> tuple[ProcessingRequest, ProcessingRequest]:
    headers, content = ProcessingRequest(), ProcessingRequest()
    values = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
    for key, value in values.items():
        headers.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    headers.protocol_config.request_body_mode = BodyMode.BUFFERED
    content.request_body.body = body
    content.request_body.end_of_stream = True
    return headers, content


def response_message(endpoint: str) -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    message.attributes["envoy.filters.http.ext_proc"].fields["upstream.address"].string_value = endpoint
    return message


def destination_of(answer: Any) -> str | None:
    """Return the first endpoint that an answer names."""
    if not isinstance(answer, ProcessingResponse):
        return None  # the call has ended
    kind = answer.WhichOneof("response")
    if kind not in ("request_headers", "request_body"):
        return None
    for option in getattr(answer, kind).response.header_mutation.set_headers:
        if option.header.key == DESTINATION:
            return str(option.header.raw_value, "ascii").partition(",")[0].strip()
    return None


def table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Return the means over the rounds; `of one`: the fullest pod's load beside the first setup's."""
    heads = (
        f"{'fullest / mean':>15}{'of one':>8}{'in flight a pod':>17}{'failed':>8}{'picker CPU ms':>15}{'late ms':>9}"
    )
    lines = [f"{'':30}{heads}"]
    first = statistics.mean(1 + run.imbalance for run in next(iter(outcomes.values())))
    for name, runs in outcomes.items():
        fullest = statistics.mean(1 + run.imbalance for run in runs)
        lines.append(
            f"{name:30}{fullest:15.3f}{fullest / first:8.3f}{statistics.mean(run.in_flight for run in runs):17.1f}"
            f"{sum(run.failed for run in runs):8}{statistics.mean(run.picker_cpu_ms for run in runs):15.2f}"
            f"{max(run.late_ms for run in runs):9.0f}"
        )
    return "\n".join(lines)


async def compare(load: Load, *, rounds: int, flags: Sequence[str]) -> dict[str, list[Outcome]]:
    """Run every setup once a round; each round has arrivals of its own."""
    outcomes: dict[str, list[Outcome]] = {setup.name: [] for setup in SETUPS}
    for number in range(rounds):
        of_round = replace(load, seed=load.seed + number)
        for setup in SETUPS:
            outcomes[setup.name].append(await run_setup(setup, of_round, flags=flags))
    return outcomes


def main() -> None:
    """Parse the flags, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pods", type=int, default=6)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second, over all pickers")
    parser.add_argument("--seconds", type=float, default=10.0, help="of load, a setup and round")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("flags", nargs="*", help="further flags for every picker, after --")
    options = parser.parse_args()
    load = Load(pods=options.pods, requests_per_second=options.rate, seconds=options.seconds)
    try:
        outcomes = uvloop.run(compare(load, rounds=options.rounds, flags=options.flags))
    except KeyboardInterrupt:
        sys.exit("interrupted: everything that was started has ended")
    except UpError as error:
        sys.exit("\n".join((error.message, *error.log_lines)))
    print(table(outcomes))
    if options.json is not None:
        figures = {name: [asdict(run) for run in runs] for name, runs in outcomes.items()}
        options.json.write_text(
            json.dumps({"machine": machine(), "flags": options.flags, "replicas": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

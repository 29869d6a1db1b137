"""The load generator: its own process, so that measuring costs the measured nothing but CPU time.

`stage` starts it as `python -m bench.load`, writes one JSON job per line to its standard input and reads one JSON
result per line. Raw HTTP/1.1 with keep-alive on asyncio streams under uvloop; each worker has one request in flight.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

REQUEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Send every body of a file once, `concurrency` at a time; the file holds one JSON body per line."""

    host: str
    port: int
    path: str
    bodies_file: str
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Latencies in milliseconds from the first byte sent to the last byte received, and what went wrong."""

    latencies_ms: list[float]
    seconds: float
    errors: list[str]


async def carry_out(job: Job) -> JobResult:
    """Read the bodies and open the connections, then send; every worker takes the next body until none is left."""
    pending = Path(job.bodies_file).read_bytes().splitlines()[::-1]
    latencies: list[float] = []
    errors: list[str] = []
    head = (
        f"POST {job.path} HTTP/1.1\r\nhost: {job.host}:{job.port}\r\ncontent-type: application/json\r\ncontent-length: "
    ).encode()
    connections = [await asyncio.open_connection(job.host, job.port) for _ in range(job.concurrency)]

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while pending and not errors:
            body = pending.pop()
            request = b"%s%d\r\n\r\n%s" % (head, len(body), body)
            began = time.perf_counter()
            writer.write(request)
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    status, content = await read_response(reader)
            except (TimeoutError, OSError, EOFError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                return
            latencies.append((time.perf_counter() - began) * 1000)
            if status != 200:
                errors.append(f"status {status}: {content[:300].decode(errors='replace')}")

    started = time.perf_counter()
    async with asyncio.TaskGroup() as workers:
        for number, (reader, writer) in enumerate(connections):
            workers.create_task(work(reader, writer), name=f"worker {number}")
    seconds = time.perf_counter() - started
    for _, writer in connections:
        writer.close()
    return JobResult(latencies_ms=latencies, seconds=seconds, errors=errors)


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body; Envoy answers with a length or in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    status = int(lines[0].split(b" ", 2)[1])
    for line in lines[1:]:
        if line.startswith(b"content-length:"):
            return status, await reader.readexactly(int(line[15:]))
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)
    return status, b"".join(parts)


async def serve_jobs() -> None:
    """One job per line until the input ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        job = Job(**json.loads(line))
        print(json.dumps(asdict(await carry_out(job))), flush=True)


class LoadProcess:
    """The other end: the load generator as seen by `stage`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> "LoadProcess":
        """Start it; it ends when its input ends."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.load"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=64 * 2**20,  # a result is one line
            start_new_session=True,  # Ctrl-C in the terminal reaches the bench alone, which then ends it
        )
        return cls(process)

    async def run(self, job: Job, *, within_seconds: float) -> JobResult:
        """The job's result; raise TimeoutError or RuntimeError if there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(within_seconds):
            self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the load generator ended")
        fields: dict[str, Any] = json.loads(line)
        return JobResult(**fields)

    async def end(self) -> None:
        """Close its input and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


if __name__ == "__main__":
    uvloop.run(serve_jobs())

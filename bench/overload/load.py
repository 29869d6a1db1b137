"""The clients, in a process of their own: `python -m bench.overload.load JOB OUTCOMES` plays a script once.

Open loop: each request is sent when it is due, however busy the pods are. Clients that obey come back when a refusal's
Retry-After says so. Prints one line when the clock starts, and writes the outcomes as JSON when all is over.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import uvloop

from bench.overload.refusable_http import Answer, exchange, post
from bench.overload.script import Attempt, Job, Outcome, Request
from operate.load.streamed_answer import BadAnswerError

HEAD_START_SECONDS = 0.2
PATH = "/v1/completions"
CLASS_HEADER = "x-gateway-inference-objective"
MOST_RETRY_SECONDS = 15.0  # no client is patient for longer: a run takes a minute
TENANT_HEADER = "x-gateway-inference-fairness-id"


Ask = Callable[[Request, Answer], Awaitable[None]]  # sends a request once and fills the answer in


class Clients:
    """Plays the requests of one job. `clock` is monotonic seconds, also those of `Answer.first_at`."""

    def __init__(self, job: Job, *, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._ask = ask
        self._clock = clock
        self._start = clock() + HEAD_START_SECONDS
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """Return when the last client is done."""
        async with asyncio.TaskGroup() as clients:
            for request in self._job.requests:
                await self._until(request.due)
                clients.create_task(self._play(request), name=f"client {request.number}")

    async def _play(self, request: Request) -> None:
        attempts = [await self._attempt(request)]
        while (wait := self._comes_back_after(request, attempts)) is not None:
            await asyncio.sleep(wait)
            attempts.append(await self._attempt(request))
        self.outcomes.append(
            Outcome(
                due=request.due,
                tenant=request.tenant,
                class_name=request.class_name,
                work_tokens=request.work_tokens,
                obeys=request.obeys,
                attempts=tuple(attempts),
            )
        )

    def _comes_back_after(self, request: Request, attempts: list[Attempt]) -> float | None:
        last = attempts[-1]
        if not request.obeys or not last.is_refused or len(attempts) >= self._job.most_attempts:
            return None
        return None if last.retry_after is None else min(last.retry_after, MOST_RETRY_SECONDS)

    async def _attempt(self, request: Request) -> Attempt:
        job, answer, error = self._job, Answer(), None
        sent = self._now()
        try:
            async with asyncio.timeout(job.patience_seconds):
                await self._ask(request, answer)
        except TimeoutError:
            error = f"no whole answer within {job.patience_seconds:g} s"
        except (OSError, BadAnswerError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error is None and not answer.done:
            error = f"status {answer.status} {answer.headers.get('x-kvmesh-reason', '')}".strip()
        return Attempt(
            sent=sent,
            ended=self._now(),
            status=answer.status,
            first=None if answer.first_at is None else answer.first_at - self._start,
            pieces=answer.pieces,
            retry_after=_retry_after(answer.headers),
            reason=answer.headers.get("x-kvmesh-reason", ""),
            degraded=answer.headers.get("x-kvmesh-degraded", ""),
            error=error,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
        )

    def _now(self) -> float:
        return self._clock() - self._start

    async def _until(self, when: float) -> None:
        if (wait := when - self._now()) > 0:
            await asyncio.sleep(wait)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """As the openai SDKs read it: milliseconds first."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            return float(headers[name]) * unit
    return None


def body_of(model: str, request: Request) -> bytes:
    """Answers are of fixed length, so that all arms have the same work."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def http(job: Job) -> Ask:
    """Send over HTTP to the job's gateway."""

    async def ask(request: Request, answer: Answer) -> None:
        headers = {CLASS_HEADER: request.class_name, TENANT_HEADER: request.tenant}
        await exchange(job.host, job.port, post(job.host, job.port, PATH, body_of(job.model, request), headers), answer)

    return ask


def main() -> None:
    job_file, outcomes_file = (Path(argument) for argument in sys.argv[1:3])
    job = msgspec.json.decode(job_file.read_bytes(), type=Job)

    async def play() -> list[Outcome]:
        clients = Clients(job, ask=http(job))
        print("began", flush=True)
        await clients.run()
        return clients.outcomes

    outcomes_file.write_bytes(msgspec.json.encode(uvloop.run(play())))


if __name__ == "__main__":
    main()

"""The clients, in a process of their own: `python -m bench.routing.load JOB RECORDS` plays a script once.

Open loop: each turn is sent when it is due, however busy the pods are; only the turn before must have been answered.
Prints one line when the clock starts, and writes the records as JSON when all is over.
"""

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.routing.script import Job, Record, Session, Turn
from bench.routing.streamed_http import BadAnswerError, StreamedAnswer, exchange, post

HEAD_START_SECONDS = 0.1
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


class Clients:
    """Plays the sessions of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._gateways = itertools.cycle(job.gateways)
        self._start = time.monotonic() + HEAD_START_SECONDS
        self.records: list[Record] = []

    async def run(self) -> None:
        """Return when the last answer is there."""
        print("began", flush=True)
        async with asyncio.TaskGroup() as sessions:
            for session in self._job.sessions:
                sessions.create_task(self._play(session), name=session.name)

    async def _play(self, session: Session) -> None:
        messages: list[dict[str, str]] = []
        if session.system is not None:
            messages.append({"role": "system", "content": session.system})
        ready = 0.0
        for number, turn in enumerate(session.turns):
            ready = max(ready, turn.due)
            await asyncio.sleep(max(0.0, self._start + ready - time.monotonic()))
            asked = [*messages, {"role": "user", "content": turn.text}]
            record = await self._ask(session, number, turn, asked, ready=ready)
            self.records.append(record)
            ready = record.ended
            if record.error is None:  # a question without an answer is not part of the chat
                messages = [*asked, {"role": "assistant", "content": record.answer}]

    async def _ask(
        self, session: Session, number: int, turn: Turn, messages: list[dict[str, str]], *, ready: float
    ) -> Record:
        host, port = next(self._gateways)
        path, body = _body(self._job.model, session, turn, messages)
        answer, error = StreamedAnswer(), None
        sent = time.monotonic() - self._start
        try:
            async with asyncio.timeout(self._job.request_seconds):
                answer = await exchange(host, port, post(host, port, path, body))
        except TimeoutError:
            error = f"no whole answer within {self._job.request_seconds:g} s"
        except (OSError, BadAnswerError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        return Record(
            session=session.name,
            turn=number,
            due=turn.due,
            ready=ready,
            sent=sent,
            first=None if answer.first_at is None else answer.first_at - self._start,
            ended=time.monotonic() - self._start,
            error=error,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            answer="".join(answer.pieces),
        )


def _body(model: str, session: Session, turn: Turn, messages: list[dict[str, str]]) -> tuple[str, bytes]:
    """The path and the body; answers are of fixed length, so that all arms have the same work."""
    request: dict[str, Any] = {
        "model": model,
        "max_tokens": turn.answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if session.system is None:
        return COMPLETION_PATH, msgspec.json.encode(request | {"prompt": turn.text})
    return CHAT_PATH, msgspec.json.encode(request | {"messages": messages})


def main() -> None:
    job_file, records_file = (Path(argument) for argument in sys.argv[1:3])
    job = msgspec.json.decode(job_file.read_bytes(), type=Job)

    async def play() -> list[Record]:
        clients = Clients(job)
        await clients.run()
        return clients.records

    records_file.write_bytes(msgspec.json.encode(uvloop.run(play())))


if __name__ == "__main__":
    main()

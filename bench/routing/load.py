"""The clients, in a process of their own: `python -m bench.routing.load JOB RECORDS` plays a script once.

Open loop: each turn is sent when it is due, however busy the pods are; only the turn before must have been answered.
Prints one line when the clock starts, and writes the records as JSON when all is over.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.routing.script import Job
from bench.routing.streamed_http import exchange, post
from operate.load.clients import Ask, Clients
from operate.load.request_body import CHAT_PATH, COMPLETION_PATH, Message
from operate.load.script import Record, Session, Turn
from operate.load.streamed_answer import StreamedAnswer


def http(job: Job) -> Ask:
    """Send over HTTP to the job's gateways in turn."""
    gateways = itertools.cycle(job.gateways)

    async def ask(session: Session, turn: Turn, messages: Sequence[Message], answer: StreamedAnswer) -> None:
        host, port = next(gateways)
        path, body = _body(job.model, session, turn, messages)
        await exchange(host, port, post(host, port, path, body), answer)

    return ask


def _body(model: str, session: Session, turn: Turn, messages: Sequence[Message]) -> tuple[str, bytes]:
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
        clients = Clients(job.sessions, ask=http(job), request_seconds=job.request_seconds)
        print("began", flush=True)
        await clients.run()
        return clients.records

    records_file.write_bytes(msgspec.json.encode(uvloop.run(play())))


if __name__ == "__main__":
    main()

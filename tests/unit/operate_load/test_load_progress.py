"""What `kvmesh load` says while it plays, in virtual time."""

import asyncio
from collections.abc import Sequence

from bench.virtual_loop import run
from operate.load.clients import Clients
from operate.load.plan import Load
from operate.load.play import progress
from operate.load.request_body import Message
from operate.load.script import Session, Turn
from operate.load.streamed_answer import StreamedAnswer


async def never(_: Session, _turn: Turn, _messages: Sequence[Message], _answer: StreamedAnswer) -> None:
    await asyncio.Event().wait()


def test_once_all_are_sent_it_says_for_how_many_answers_it_waits() -> None:
    turns = [(Turn(due=due, text="why?", answer_tokens=1),) for due in (1.0, 2.0)]
    load = Load(title="", sessions=[Session(name="a", system=None, turns=each) for each in turns], measured_from=0.0)

    async def playing() -> list[str]:
        clock = asyncio.get_running_loop().time
        clients = Clients(load.sessions, ask=never, request_seconds=60.0, clock=clock)
        running, lines = asyncio.create_task(clients.run()), []
        for seconds in (1.6, 1.0):
            await asyncio.sleep(seconds)
            lines.append(progress(clients, load, name="kvmesh"))
        await running
        return [*lines, progress(clients, load, name="kvmesh")]

    assert run(playing()) == [
        "kvmesh: 2 of 2 s, 1 of 2 sent, 0 answered, 0 not, 1 in flight",
        "kvmesh: 2 of 2 s, 2 of 2 sent, 0 answered, 0 not, waiting for 2 answers",
        "kvmesh: 62 of 2 s, 2 of 2 sent, 0 answered, 2 not, 0 in flight",
    ]

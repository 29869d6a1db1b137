"""The clients: play sessions once, open loop, and record the results.

Each turn is sent when due, however busy the servers are, once the turn before has been answered. So a slow server gets
as many requests as a fast one. The caller supplies the function that sends a request.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from operate.load.request_body import Message, opening
from operate.load.script import Record, Session, Turn
from operate.load.streamed_answer import BadAnswerError, StreamedAnswer, problem_of, refusal_of

HEAD_START_SECONDS = 0.1

# sends a turn with the chat so far and fills in the answer; raises BadAnswerError or OSError
Ask = Callable[[Session, Turn, Sequence[Message], StreamedAnswer], Awaitable[None]]


class Clients:
    """Plays the sessions of a load. `clock` is in monotonic seconds; `ask` must time the answers by the same clock."""

    def __init__(
        self,
        sessions: Sequence[Session],
        *,
        ask: Ask,
        request_seconds: float,
        salt: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions = sessions
        self._ask = ask
        self._request_seconds = request_seconds
        self._salt = salt
        self._clock = clock
        self._start = clock() + HEAD_START_SECONDS
        self.records: list[Record] = []
        self.sent = 0

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        return self.sent - len(self.records)

    @property
    def seconds(self) -> float:
        """Seconds since the start; negative during the head start."""
        return self._clock() - self._start

    async def run(self) -> None:
        """Run until the last answer. If cancelled, requests in flight are not recorded."""
        async with asyncio.TaskGroup() as sessions:
            for session in self._sessions:
                sessions.create_task(self._play(session), name=session.name)

    async def _play(self, session: Session) -> None:
        messages = opening(session, salt=self._salt)
        ready = 0.0
        for number, turn in enumerate(session.turns):
            ready = max(ready, turn.due)
            await asyncio.sleep(max(0.0, ready - self.seconds))
            asked = (*messages, {"role": "user", "content": turn.text})
            record = await self._send(session, number, asked, ready=ready)
            self.records.append(record)
            ready = record.ended
            if record.is_answered:  # an unanswered question is dropped from the chat
                messages = (*asked, {"role": "assistant", "content": record.answer})

    async def _send(self, session: Session, number: int, messages: Sequence[Message], *, ready: float) -> Record:
        turn, answer, error = session.turns[number], StreamedAnswer(), None
        sent = self.seconds
        self.sent += 1
        try:
            async with asyncio.timeout(self._request_seconds):
                await self._ask(session, turn, messages, answer)
        except TimeoutError:
            error = f"no whole answer within {self._request_seconds:g} s"
        except BadAnswerError as failure:
            error = str(failure)
        except OSError as failure:
            error = f"{type(failure).__name__}: {failure}"
        refused = None if error else refusal_of(answer)
        return Record(
            session=session.name,
            turn=number,
            due=turn.due,
            ready=ready,
            sent=sent,
            first=None if answer.first_at is None else answer.first_at - self._start,
            ended=self.seconds,
            error=error or (None if refused else problem_of(answer)),
            refused=refused,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            tells_cached=answer.tells_cached,
            answer="".join(answer.pieces),
            gaps=answer.gaps,
            server=answer.server,
        )

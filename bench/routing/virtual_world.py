"""Pods, clients and faults in virtual time: a queue of events around the simulated pods' own scheduler.

Called by `virtual`; a `Router` decides where each request goes. Nothing here waits.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from bench.routing.one_cache import BLOCK_TOKENS, prompt_tokens
from bench.routing.script import Workload
from bench.routing.virtual_pod import Pod
from extproc.pods.endpoint import EndpointStatus
from operate.load.script import Record, Session
from operate.load.workloads import Texts
from podsim.core.block_hash import extend_chain
from podsim.core.scheduler import Generation, State, Step
from podsim.model_folder import ModelFolder

SCRAPE_SECONDS = 0.2  # as `kvmesh extproc` by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request as a router sees it."""

    tokens: Sequence[int]
    hashes: Sequence[bytes]  # the engine's
    answer_tokens: int


class Router(Protocol):
    """What spreads the load."""

    def pick(self, arrival: Arrival, *, now: float) -> tuple[int, Any] | None:
        """The pod's number, and what `ended` gets back; None: the request waits for room."""

    def tokens_to_compute(self, arrival: Arrival, *, now: float) -> int:
        """Of those that wait, the request with the fewest goes first."""

    def answered(self, ticket: Any) -> None:
        """The first piece of the answer has passed."""

    def ended(self, ticket: Any, *, now: float) -> None:
        """The request is over."""

    def scraped(self, statuses: Sequence[EndpointStatus], *, now: float) -> None:
        """The pods have reported."""


class RoundRobin:
    """Each pod in turn."""

    def __init__(self, pods: Sequence[Pod]) -> None:
        self._turns = itertools.cycle(range(len(pods)))

    def pick(self, arrival: Arrival, *, now: float) -> tuple[int, Any]:  # noqa: ARG002
        return next(self._turns), None

    def tokens_to_compute(self, arrival: Arrival, *, now: float) -> int:  # noqa: ARG002
        return 0

    def answered(self, ticket: Any) -> None: ...

    def ended(self, ticket: Any, *, now: float) -> None: ...

    def scraped(self, statuses: Sequence[EndpointStatus], *, now: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    session: Session
    turn: int
    at: float
    arrival: Arrival
    answer: str
    router: Router


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    asked: _Asked
    pod: int
    ticket: Any
    first: float | None = None


@dataclass(slots=True)
class World:
    """The events of one run, in order of time."""

    workload: Workload
    pods: Sequence[Pod]
    routers: Sequence[Router]
    folder: ModelFolder
    texts: Texts
    records: list[Record] = field(default_factory=list)
    regrets: list[float] = field(default_factory=list)  # seconds; one a request
    _events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)
    _turn: "itertools.count[int]" = field(default_factory=itertools.count)
    _open: dict[Generation, _UnderWay] = field(default_factory=dict)
    _chats: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    _waiting: list[list[tuple[int, int, _Asked]]] = field(init=False)  # a heap for each router
    _left: int = 0

    def __post_init__(self) -> None:
        self._waiting = [[] for _ in self.routers]

    def run(self) -> None:
        """Play until every request has been answered."""
        for session in self.workload.sessions:
            self._chats[session.name] = (
                [] if session.system is None else [{"role": "system", "content": session.system}]
            )
            self._left += len(session.turns)
            self._at(session.turns[0].due, partial(self._send, session, 0))
        for restart in self.workload.restarts:
            self._at(restart.at, partial(self._kill, restart.pod))
        self._at(0.0, self._scrape)
        while self._left:
            now, _, what = heapq.heappop(self._events)
            what(now)

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def _scrape(self, now: float) -> None:
        statuses = [pod.report(now) for pod in self.pods]
        for router in self.routers:
            router.scraped(statuses, now=now)
        self._serve(now)
        self._at(now + SCRAPE_SECONDS, self._scrape)

    def _send(self, session: Session, number: int, now: float) -> None:
        turn = session.turns[number]
        messages = [*self._chats[session.name], {"role": "user", "content": turn.text}]
        prompt = list(prompt_tokens(session, messages, folder=self.folder))
        answer = " " + self.texts.draw(turn.answer_tokens)
        self._chats[session.name] = [*messages, {"role": "assistant", "content": answer}]
        hashes: list[bytes] = []
        extend_chain(hashes, prompt, block_size=BLOCK_TOKENS, tokens=len(prompt))
        which = next(self._turn) % len(self.routers)
        asked = _Asked(
            session=session,
            turn=number,
            at=now,
            arrival=Arrival(tokens=prompt, hashes=hashes, answer_tokens=turn.answer_tokens),
            answer=answer,
            router=self.routers[which],
        )
        waiting = self._waiting[which]
        if waiting or not self._goes(asked, now):
            tokens = asked.router.tokens_to_compute(asked.arrival, now=now)
            heapq.heappush(waiting, (tokens, next(self._order), asked))

    def _serve(self, now: float) -> None:
        """Try those that wait, those with the fewest tokens to compute first, as the picker's queue does."""
        for waiting in self._waiting:
            while waiting and self._goes(waiting[0][-1], now):
                heapq.heappop(waiting)

    def _goes(self, asked: _Asked, now: float) -> bool:
        """Send it if there is room for it."""
        arrival = asked.arrival
        picked = asked.router.pick(arrival, now=now)
        if picked is None:
            return False
        pod, ticket = picked
        count, turn = len(arrival.tokens), asked.session.turns[asked.turn]
        times = [each.first_token_seconds(arrival.hashes, count, now=now) for each in self.pods]
        if turn.due >= self.workload.measured_from:
            self.regrets.append(times[pod] - min(times))
        generation = Generation(
            token_ids=[
                *arrival.tokens,
                *self.folder.encode(asked.answer, add_special_tokens=False)[: turn.answer_tokens],
            ],
            prompt_tokens=count,
            arrived_at=now,
            hashes=list(arrival.hashes),
        )
        self._open[generation] = _UnderWay(asked=asked, pod=pod, ticket=ticket)
        self.pods[pod].add(generation)
        if self.pods[pod].step is None:
            self._begin(pod, now)
        return True

    def _begin(self, number: int, now: float) -> None:
        pod = self.pods[number]
        step = pod.begin_step(now)
        if step is not None:
            self._at(step.ends_at, lambda then: self._finish(number, step, then))

    def _finish(self, number: int, step: Step, now: float) -> None:
        pod = self.pods[number]
        if pod.step is not step:
            return  # killed meanwhile
        for generation in pod.finish_step(now)[0].produced:
            under_way = self._open[generation]
            if under_way.first is None:
                under_way.first = now
                under_way.asked.router.answered(under_way.ticket)
            if generation.state is State.FINISHED:
                self._end(generation, now, error=None)
        self._begin(number, now)
        self._serve(now)

    def _kill(self, number: int, now: float) -> None:
        """The pod's answers are lost; it is back, empty, at once."""
        self.pods[number].restart()
        for generation in [one for one, under_way in self._open.items() if under_way.pod == number]:
            self._end(generation, now, error="killed")

    def _end(self, generation: Generation, now: float, *, error: str | None) -> None:
        under_way = self._open.pop(generation)
        under_way.asked.router.ended(under_way.ticket, now=now)
        asked = under_way.asked
        session, number = asked.session, asked.turn
        chat = self._chats[session.name]
        self.records.append(
            Record(
                session=session.name,
                turn=number,
                due=session.turns[number].due,
                ready=asked.at,
                sent=asked.at,
                first=under_way.first,
                ended=now,
                error=error,
                prompt_tokens=generation.prompt_tokens,
                cached_tokens=generation.cached_tokens,
                answer=chat[-1]["content"],
            )
        )
        if error is not None:
            self._chats[session.name] = chat[:-2]
        self._left -= 1
        if number + 1 < len(session.turns):
            due = max(now, session.turns[number + 1].due)
            self._at(due, lambda then: self._send(session, number + 1, then))

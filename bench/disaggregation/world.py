"""Clients, pods and prefill legs in virtual time: a queue of events. Nothing here waits.

A request goes to its pod, or first as a leg to a prefill pod, whose blocks the decode pod then fetches over both pods'
links, as `podsim.kv_loader` and `podsim.kv_transfer` do.
"""

import heapq
import itertools
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from bench.disaggregation.loads import Load, Request
from bench.disaggregation.picker import Pick, Picker
from bench.disaggregation.plan import Plan
from bench.disaggregation.pods import Pod
from podsim.core.scheduler import Generation, State

SCRAPE_SECONDS = 0.2  # as `kvmesh extproc` by default
HOP_SECONDS = 0.002  # from the gateway or the picker to a pod, and back


class Clock:
    """The time of the event that is being handled, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """One request as its client sees it; times in seconds after the start of the run."""

    request: Request
    sent: float
    remote: bool  # a prefill pod has computed the prompt
    fell_back: bool = False  # one was to
    first: float = 0.0
    ended: float = 0.0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.sent

    @property
    def inter_token(self) -> float:
        """Mean seconds between its tokens."""
        return (self.ended - self.first) / max(self.request.answer_tokens - 1, 1)


@dataclass(slots=True, kw_only=True, eq=False)
class _UnderWay:
    session: tuple[Request, ...]
    turn: int
    record: Record
    pick: Pick


@dataclass(slots=True, kw_only=True, eq=False)
class _Transfer:
    generation: Generation  # of the decode pod
    decode: Pod
    source: Pod
    kept: Generation  # of the prefill pod
    began: float
    size: float
    ends: int = 2  # links that have not carried it yet


@dataclass(slots=True, kw_only=True)
class World:
    """The events of one run, in order of time."""

    load: Load
    plan: Plan
    pods: Mapping[str, Pod]
    picker: Picker
    clock: Clock
    records: list[Record] = field(default_factory=list)
    gaps: "array[float]" = field(default_factory=lambda: array("d"))  # between tokens of one answer, of measured time
    tokens: int = 0  # generated for clients in measured time
    busy: dict[str, float] = field(default_factory=dict)  # seconds of steps in measured time, by pod
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)
    _answers: dict[Generation, _UnderWay] = field(default_factory=dict)
    _legs: dict[Generation, _UnderWay] = field(default_factory=dict)
    _sources: dict[Generation, tuple[Pod, Generation]] = field(default_factory=dict)  # of loads that have not started
    _left: int = 0

    def run(self) -> None:
        """Play until every request has been answered."""
        self._left = self.load.requests
        self.busy = dict.fromkeys(self.pods, 0.0)
        for session in self.load.sessions:
            self._at(session[0].due, partial(self._send, session, 0))
        for number, pod in enumerate(self.pods.values()):
            self._at(SCRAPE_SECONDS * number / len(self.pods), partial(self._scrape, pod))
        while self._left:
            self.clock.now, _, what = heapq.heappop(self._events)
            what()

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def _soon(self, what: Callable[[], None]) -> None:
        self._at(self.clock.now + HOP_SECONDS, what)

    def _scrape(self, pod: Pod) -> None:
        self.picker.scraped(pod.report(self.clock.now))
        self._at(self.clock.now + SCRAPE_SECONDS, partial(self._scrape, pod))

    def _send(self, session: tuple[Request, ...], turn: int) -> None:
        request = session[turn]
        pick = self.picker.pick(request)
        record = Record(request=request, sent=self.clock.now, remote=pick.leg is not None)
        under_way = _UnderWay(session=session, turn=turn, record=record, pick=pick)
        self._soon(partial(self._decode, under_way, None) if pick.leg is None else partial(self._prefill, under_way))

    def _prefill(self, under_way: _UnderWay) -> None:
        """The leg arrives at its prefill pod."""
        request, leg = under_way.record.request, under_way.pick.leg
        assert leg is not None, "a leg ends after it has begun"
        generation = Generation(
            token_ids=request.token_ids[: request.prompt_tokens + 1],
            prompt_tokens=request.prompt_tokens,
            arrived_at=self.clock.now,
            hashes=request.hashes[: request.prompt_tokens // self.plan.engine.block_size],
            keeps_blocks=True,
        )
        self._legs[generation] = under_way
        self._at(under_way.record.sent + leg.seconds, partial(self._give_up, generation))
        self._add(self.pods[leg.endpoint], generation)

    def _give_up(self, generation: Generation) -> None:
        """The time for a leg is over: the decode pod computes the prompt."""
        under_way = self._legs.pop(generation, None)
        if under_way is None:
            return  # it has been answered
        leg = under_way.pick.leg
        assert leg is not None, "it has not been answered"
        self.pods[leg.endpoint].scheduler.abort(generation)
        self._leg_ended(under_way, None)

    def _leg_ended(self, under_way: _UnderWay, kept: tuple[Pod, Generation] | None) -> None:
        """The picker has the leg's answer, or none."""
        self.picker.leg_ended(under_way.pick, brought=kept is not None)
        if kept is None:
            under_way.record.remote, under_way.record.fell_back = False, True
        self._soon(partial(self._decode, under_way, kept))

    def _decode(self, under_way: _UnderWay, kept: tuple[Pod, Generation] | None) -> None:
        """The request arrives at the pod that answers; `kept`: where its prompt's blocks are."""
        request = under_way.record.request
        generation = Generation(
            token_ids=request.token_ids,
            prompt_tokens=request.prompt_tokens,
            arrived_at=self.clock.now,
            hashes=request.hashes,
            loads_prompt=kept is not None,
        )
        self._answers[generation] = under_way
        if kept is not None:
            self._sources[generation] = kept
        self._add(
            self.pods[under_way.pick.endpoint],
            generation,
            prefill_cached_tokens=kept[1].cached_tokens if kept is not None else None,
        )

    def _add(self, pod: Pod, generation: Generation, *, prefill_cached_tokens: int | None = None) -> None:
        pod.add(generation, prefill_cached_tokens=prefill_cached_tokens)
        self._wake(pod)

    def _wake(self, pod: Pod) -> None:
        """Begin the pod's next step if none runs."""
        if pod.step is not None:
            return
        step = pod.begin_step(self.clock.now)
        for generation in pod.scheduler.take_started_loads():
            self._fetch(pod, generation)
        if step is not None:
            self._at(step.ends_at, partial(self._finish, pod))

    def _finish(self, pod: Pod) -> None:
        now = self.clock.now
        outcome, gaps = pod.finish_step(now)
        if self.plan.warm_seconds <= now <= self.plan.seconds:
            self.busy[pod.address] += now - max(pod.step_began, self.plan.warm_seconds)
            self.gaps.extend(gaps)
            self.tokens += sum(generation in self._answers for generation in outcome.produced)
        for generation in outcome.produced:
            if (under_way := self._answers.get(generation)) is not None:
                self._answered(generation, under_way, now)
            elif generation.state is State.FINISHED:
                self._soon(partial(self._leg_ended, self._legs.pop(generation), (pod, generation)))
        pod.step = None
        self._wake(pod)

    def _answered(self, generation: Generation, under_way: _UnderWay, now: float) -> None:
        """The client gets a token."""
        record = under_way.record
        if generation.produced == 1:
            record.first = now + HOP_SECONDS
        if generation.state is not State.FINISHED:
            return
        record.ended = now + HOP_SECONDS
        del self._answers[generation]
        self.picker.ended(under_way.pick)
        self.records.append(record)
        self._left -= 1
        session, turn = under_way.session, under_way.turn + 1
        if turn < len(session):
            self._at(max(record.ended, session[turn].due), partial(self._send, session, turn))

    def _fetch(self, pod: Pod, generation: Generation) -> None:
        """The decode pod has blocks for a prompt: they are filled over both links."""
        source, kept = self._sources.pop(generation)
        blocks = len(generation.blocks) - generation.cached_blocks
        transfer = _Transfer(
            generation=generation,
            decode=pod,
            source=source,
            kept=kept,
            began=self.clock.now,
            size=float(blocks * self.plan.engine.block_size * self.plan.link.bytes_per_token),
        )
        self._at(self.clock.now + self.plan.link.fixed_seconds, partial(self._carry, transfer))

    def _carry(self, transfer: _Transfer) -> None:
        for pod in (transfer.decode, transfer.source):
            pod.link.begin(transfer, transfer.size, now=self.clock.now)
            self._watch(pod)

    def _watch(self, pod: Pod) -> None:
        due = pod.link.next_end()
        if due is not None and due != pod.link_due:
            self._at(max(due, self.clock.now), partial(self._carried, pod, due))
        pod.link_due = due

    def _carried(self, pod: Pod, due: float) -> None:
        """Transfers have passed a pod's link."""
        if due != pod.link_due:
            return  # others have joined them since
        pod.link_due = None
        for transfer in pod.link.ended(now=self.clock.now):
            assert isinstance(transfer, _Transfer), "nothing else is on the links"
            transfer.ends -= 1
            if not transfer.ends:
                self._fetched(transfer)
        self._watch(pod)

    def _fetched(self, transfer: _Transfer) -> None:
        transfer.decode.fetched(size=transfer.size, seconds=self.clock.now - transfer.began)
        transfer.source.scheduler.release_kept(transfer.kept)
        transfer.decode.scheduler.finish_load(transfer.generation)
        for pod in (transfer.source, transfer.decode):
            self._wake(pod)

"""Replays recorded arrivals under a policy: what becomes of each request, in virtual time.

Deciding is the picker's own code with the loop's clock; the pods are `simulated_pod`. The same arrivals and policy give
the same result each time.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from extproc.errors import PickError
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pick import pick
from extproc.pods.endpoint import EndpointModels
from extproc.policy.priority import ClassRule, PriorityPolicy
from extproc.policy.values import PickPolicy
from extproc.records.access_log import AccessRecord
from extproc.records.request_events import Decided, Ended, RequestOutcome
from extproc.replay_log.arrivals import Arrival
from extproc.replay_log.fates import ABANDONED, REFUSED, SERVED, Fate
from extproc.replay_log.simulated_pod import Generation, PodPace
from extproc.replay_log.simulated_pool import SimulatedPods, simulated_pool
from extproc.replay_log.virtual_loop import run
from extproc.replay_log.virtual_pool import VirtualPool

TENANT_HEADER = "x-tenant"
TOLD_EVERY = 500  # requests
LEAD_SECONDS = 1.0  # before the first request: the pods have reported
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")  # of the body, which degradation lowers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The pods that the requests go to."""

    addresses: tuple[str, ...]
    pace: PodPace
    models: Mapping[str, EndpointModels]  # what each serves, as far as the log shows it


def simulate(
    arrivals: Sequence[Arrival],
    *,
    policy: PickPolicy,
    models: ModelTable,
    fleet: Fleet,
    by_rules: bool,
    told: Callable[[int], None] = lambda _: None,
) -> list[Fate]:
    """Return what becomes of each request, in the order of their arrivals. `by_rules`: see `replayed_policy`.

    `told` is told now and then how many have been sent.
    """
    replayed = replayed_policy(policy, by_rules=by_rules)
    return run(_play(arrivals, policy=replayed, models=models, fleet=fleet, by_rules=by_rules, told=told))


def replayed_policy(policy: PickPolicy, *, by_rules: bool) -> PickPolicy:
    """Return the policy as far as a log lets it be replayed.

    The class is the one that the log has, where the policy has one of that name. With `by_rules` it is what the rules
    say that look at path and model alone; headers and claims are not in a log.
    """
    priorities = policy.priorities
    rules = tuple(rule for rule in priorities.rules if not rule.headers and not rule.claims) if by_rules else ()
    trusting: tuple[ClassRule, ...] = tuple(msgspec.structs.replace(rule, trust_objective=False) for rule in rules)
    known: PriorityPolicy = replace(
        priorities, rules=trusting, objectives={}, trust_objective=True, tenant_claim="", tenant_header=TENANT_HEADER
    )
    return replace(policy, priorities=known)


def model_table(models: ModelTable, records: Sequence[AccessRecord]) -> ModelTable:
    """Return the policy's models, and those that the log has where the policy declares none."""
    if models.served:
        return models
    names = dict.fromkeys(record.served_model for record in records if record.served_model)
    served = tuple(ServedModel(name=name, tokens_from=TokensFrom.TEXT) for name in names)
    return replace(models, served=served)


def models_by_pod(records: Sequence[AccessRecord]) -> Mapping[str, EndpointModels]:
    """Return what each pod has served; empty where all have served the same, or nothing with a name."""
    found: dict[str, set[str]] = {}
    for record in records:
        if record.endpoint is not None and record.served_model:
            found.setdefault(record.endpoint, set()).add(record.served_model)
    if len({frozenset(names) for names in found.values()}) <= 1:
        return {}
    return {address: EndpointModels(models=frozenset(names), adapters={}) for address, names in found.items()}


async def _play(
    arrivals: Sequence[Arrival],
    *,
    policy: PickPolicy,
    models: ModelTable,
    fleet: Fleet,
    by_rules: bool,
    told: Callable[[int], None],
) -> list[Fate]:
    clock = asyncio.get_running_loop().time
    seen = _Seen()
    pods = SimulatedPods(fleet.addresses, fleet.pace, models=fleet.models, clock=clock)
    pool = simulated_pool(pods, arrivals, policy=policy, models=models, observer=seen, clock=clock)
    player = _Player(pods, pool, by_rules=by_rules)
    reports = asyncio.ensure_future(pods.scrape(pool.books))
    try:
        async with asyncio.TaskGroup() as requests:
            for arrival in arrivals:
                await asyncio.sleep(max(LEAD_SECONDS + arrival.at - clock(), 0.0))
                requests.create_task(player.play(arrival))
                if arrival.number % TOLD_EVERY == 0:
                    told(arrival.number)
        await asyncio.sleep(0)  # observers are told after the answer
    finally:
        reports.cancel()
        await asyncio.gather(reports, return_exceptions=True)
        pool.close()
    return [_whole(arrival, seen.fates[arrival.number], player.answers.get(arrival.number)) for arrival in arrivals]


class _Answer(NamedTuple):
    ttft_seconds: float  # from the arrival at the picker
    inter_token_seconds: float | None


class _Player:
    """Sends requests, and keeps their answers."""

    def __init__(self, pods: SimulatedPods, pool: VirtualPool, *, by_rules: bool) -> None:
        self._pods = pods
        self._pool = pool
        self._by_rules = by_rules
        self.answers: dict[int, _Answer] = {}

    async def play(self, arrival: Arrival) -> None:
        """Send one request, and wait for its answer."""
        clock = self._pool.runtime.clock
        arrived_at = clock()
        try:
            async with asyncio.timeout(arrival.patience_seconds):
                exchange = await pick(_facts(arrival, by_rules=self._by_rules), _body(arrival), self._pool.runtime)
        except (PickError, TimeoutError):
            return  # the observer has been told
        address = exchange.endpoints[0]
        generation = Generation(
            prompt_tokens=arrival.prompt_tokens,
            cached_tokens=arrival.cached_tokens,
            output_tokens=_capped(exchange.body, arrival.output_tokens),
            arrived_at=clock(),
        )
        try:
            if arrival.stream:
                exchange.responded(status=200, served_by=address, from_pod=True)
            await self._pods.answer(address, generation)
            if not arrival.stream:
                exchange.responded(status=200, served_by=address, from_pod=True)
            if exchange.plan.quota is not None:
                self._pool.books.generated(exchange.plan.quota, generation.produced)
            self.answers[arrival.number] = _answer(generation, arrived_at=arrived_at)
        finally:
            exchange.finish()


class _Seen:
    """Keeps what was decided of each request, and no more of it. Implements `request_events.RequestObserver`."""

    def __init__(self) -> None:
        self.fates: dict[int, Fate] = {}

    def decided(self, decided: Decided, /) -> None:
        self.fates[int(decided.record.facts.request_id)] = _decided_fate(decided)

    def ended(self, ended: Ended, /) -> None: ...


def _facts(arrival: Arrival, *, by_rules: bool) -> RequestFacts:
    return RequestFacts(
        method="POST",
        path=_path(arrival),
        objective=None if by_rules else arrival.class_name,
        request_id=str(arrival.number),
        headers={TENANT_HEADER: arrival.tenant, "content-type": "application/json"},
    )


def _path(arrival: Arrival) -> str:
    """Return the request's own path where its body can be made anew, which rules may look at."""
    return arrival.path if arrival.api in ("chat-completions", "completions", "messages") else "/v1/completions"


def _body(arrival: Arrival) -> bytes:
    """Return a body that says what the log has of the request: all but its prompt."""
    text = f"request {arrival.number}"
    is_chat = arrival.api in ("chat-completions", "messages")
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    limit = {"max_tokens": arrival.max_tokens} if arrival.max_tokens is not None else {}
    model = {"model": arrival.model} if arrival.model else {}
    return msgspec.json.encode({**model, **prompt, **limit, "stream": arrival.stream, "user": str(arrival.number)})


def _capped(body: bytes | None, output_tokens: int) -> int:
    """Return the output that is left where the load has lowered it."""
    if body is None:
        return output_tokens
    given = msgspec.json.decode(body)
    return min([output_tokens, *(int(given[name]) for name in LIMITS if given.get(name) is not None)])


def _decided_fate(decided: Decided) -> Fate:
    record, outcome = decided.record, decided.record.outcome
    kinds = {RequestOutcome.REFUSED: REFUSED, RequestOutcome.ABANDONED: ABANDONED}
    kind = kinds.get(decided.outcome_kind, SERVED)
    request_class = record.asked.request_class if record.asked is not None else None
    return Fate(
        class_name=request_class.class_name if request_class is not None else "",
        tenant=record.facts.headers[TENANT_HEADER],
        outcome=kind,
        reason=outcome.reason if kind == REFUSED and isinstance(outcome, PickError) else "",
        waited_seconds=decided.queued_seconds or 0.0,
        steps=record.asked.steps if record.asked is not None else (),
        withheld=tuple(each.code for each in record.shadow),
    )


def _answer(generation: Generation, *, arrived_at: float) -> _Answer:
    first_at, ended_at, inter_token = generation.first_at, generation.ended_at, None
    assert first_at is not None, "it has been answered"
    assert ended_at is not None, "it has been answered"
    if generation.produced > 1:
        inter_token = (ended_at - first_at) / (generation.produced - 1)
    return _Answer(ttft_seconds=first_at - arrived_at, inter_token_seconds=inter_token)


def _whole(arrival: Arrival, fate: Fate, answer: _Answer | None) -> Fate:
    if not fate.class_name:  # it was refused before it had one
        fate = replace(fate, class_name=arrival.class_name)
    return fate if answer is None else replace(fate, **answer._asdict())

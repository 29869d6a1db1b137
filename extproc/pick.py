"""The path of every request, and the page to read first: a request's bytes -> an endpoint, booked.

`prepare` reads the request and looks its prompt up; `look` and `choose` see the pool's endpoints as they are and decide
between them; `PoolRuntime.book` is where a decision takes effect. Deciding changes nothing, so `explain` is the same
path without that place. Each input but the endpoints may be missing: the pick is then made on the rest, and
`Decision.degraded` names what was missing.
"""

from collections.abc import Callable
from math import ceil

import msgspec

from extproc.admission.asked_request import AskedRequest, most_generated, require_within_limit
from extproc.admission.degradation import Measures
from extproc.admission.long_bodies import edit, read
from extproc.admission.prepared_request import (
    Picked,
    Prepared,
    Preview,
    prefix_hits,
    prompt_tokens,
    query_of,
    session_of,
    to_keeper,
    with_note,
)
from extproc.admission.withheld import (
    of_preview,
    withheld_limit,
    withheld_offload,
    withheld_quota,
    withheld_refusal,
    withheld_steps,
)
from extproc.choosing.choose import Choice, Full, Snapshot, choose, look
from extproc.errors import (
    DEFECT,
    FirstPodLateError,
    FirstPodNeededError,
    InternalPickError,
    NoReadyEndpointError,
    PickError,
    QuotaExceededError,
    RequestShedError,
    TokenQuotaExceededError,
)
from extproc.ext_proc.exchange import NO_HEADERS, RequestFacts
from extproc.policy.shadow import ShadowRule, Withheld
from extproc.pools.booked_exchange import BookedExchange
from extproc.pools.pool_runtime import PendingPick, PoolRuntime
from extproc.pools.prefill_legs import PrefillWork, plan_of
from extproc.prefixes.prompt_match import IndexHits
from extproc.quotas.quota import QuotaAsk, QuotaVerdict

MeasuresOf = Callable[..., Measures]
FIRST_POD_NOTE = "it has waited for the pool's first pod"


async def pick(facts: RequestFacts, body: bytes | None, pool: PoolRuntime) -> BookedExchange:
    """Decide and book, at once or when there is room; `body` is None where Envoy does not send it.

    Raise PickError with the answer for the client.
    """
    pending = pool.begin(facts)
    try:
        prepared = await prepare(facts, body, pool, pending)
        while True:
            try:
                exchange = await _seat(prepared, pool, pending)
                break
            except FirstPodLateError:
                raise  # no model has a pod
            except NoReadyEndpointError as refusal:
                prepared = await _fall_back(prepared, refusal, pool, pending)
    except BaseException as error:  # a client that leaves, too
        if (anywhere := pool.without_decision(pending, error)) is not None:
            return anywhere
        # raised here and not where it was in hand: a frame of its traceback that has it would keep the body with it
        if isinstance(error, Exception) and not isinstance(error, PickError):
            raise InternalPickError(DEFECT, headers=pool.told(pending, NO_HEADERS)) from error
        raise
    finally:
        pool.end(pending)
    if pending.prefill is not None:
        await _prefill(pending.prefill, prepared, exchange, pool)
    return exchange


async def explain(facts: RequestFacts, body: bytes | None, pool: PoolRuntime) -> tuple[Picked, Preview]:
    """Decide as `pick` does, and book nothing: among the endpoints with room, or among all where none has any.

    Raise PickError with the answer that the client would get.
    """
    prepared = await prepare(facts, body, pool, None)
    while True:
        try:
            snapshot = look(pool.view, prepared.query, now=pool.clock())
            break
        except NoReadyEndpointError as refusal:
            if pool.first_pod is not None and pool.first_pod.is_due():
                words = pool.first_pod.words(prepared.asked.request_class.priority_class)
                raise FirstPodNeededError(words) from refusal
            prepared = await _fall_back(prepared, refusal, pool, None)
    ceiling = pool.admission.ceiling(prepared.asked.request_class)
    found = choose(pool.view, prepared.query, snapshot, ceiling=ceiling)
    if isinstance(found, Full):
        found = choose(pool.view, prepared.query, snapshot, ceiling=None)
    assert isinstance(found, Choice), "without a ceiling there is always a choice"
    preview = pool.admission.preview(prepared, pool.view, snapshot)
    prefill = plan_of(prepared, found, pool.view, ceiling=None, races=pool.races)
    withheld: tuple[Withheld, ...] = ()
    if pool.view.policy.shadow:
        withheld = (*prepared.withheld, *of_preview(preview), *withheld_offload(prefill))
        preview = msgspec.structs.replace(preview, verdict="go")
    return Picked(prepared=prepared, choice=found, prefill=prefill, withheld=withheld), preview


async def prepare(facts: RequestFacts, body: bytes | None, pool: PoolRuntime, pending: PendingPick | None) -> Prepared:
    """Read the request and look its prompt up. Without `pending` nothing is taken for it: it is an explanation.

    Raise PickError with the answer for the client where it goes nowhere.
    """
    began = pool.clock()
    adapters = pool.view.endpoints.learned_adapters
    asked = await read(facts, body, pool.reader, pool.long_work, draw=pool.view.random(), adapters=adapters)
    if pending is None:
        return await _look_up(_under_load(asked, pool, pool.pressure.in_force), pool, None)
    pending.asked = asked
    pending.phase("parse", pool.clock() - began)
    pending.asked = asked = _under_load(asked, pool, pool.pressure.measures)
    pool.admission.turn_away(asked)
    return await _look_up(asked, pool, pending)


def _under_load(asked: AskedRequest, pool: PoolRuntime, measures_of: MeasuresOf) -> AskedRequest:
    """Return the request as the load leaves it; in shadow as it is, with what the load would take."""
    request_class, is_shadow = asked.request_class, pool.view.policy.shadow
    try:
        measures = measures_of(request_class, pool=asked.pool)
    except RequestShedError as refusal:
        if not is_shadow:
            raise
        return msgspec.structs.replace(asked, withheld=(withheld_refusal(refusal, rule=ShadowRule.DEGRADATION),))
    if is_shadow:
        return msgspec.structs.replace(asked, would_take=measures, withheld=withheld_steps(asked, measures))
    return pool.reader.under(asked, measures, adapters=pool.view.endpoints.learned_adapters)


async def _look_up(
    asked: AskedRequest, pool: PoolRuntime, pending: PendingPick | None, *, before: Prepared | None = None
) -> Prepared:
    """Edit the body and look the prompt up for one model; `before`: for another one, which has asked the quota."""
    began = pool.clock()
    degraded: dict[str, str] = {}
    sent = await edit(asked, pool.reader, pool.long_work, degraded=degraded)
    tokens = await prompt_tokens(asked, sent, pool.prompts, models=pool.reader.models, degraded=degraded)
    tokenized = pool.clock()
    if pending is not None:
        pending.phase("tokenize", tokenized - began)
        pending.prompt_tokens = tokens.estimated_tokens
    require_within_limit(asked, tokens, asked.measures)
    withheld = asked.withheld if before is None else before.withheld
    quota = before.quota if before is not None else None
    if before is None and pending is not None and pool.quotas is not None:
        key = pool.quotas.match(asked.request_class.tenant, asked.charged)
        if key is not None:
            most = most_generated(asked, sent)
            quota = pool.quotas.ask(key, prompt_tokens=tokens.estimated_tokens, most_generated=most)
            pending.quota = quota
    session = session_of(asked)
    hits = await prefix_hits(asked, tokens, pool.index, session=session, quota=quota if before is None else None)
    verdict = hits.quota if before is None else before.verdict
    if pool.view.policy.shadow and before is None:
        withheld = (*withheld, *withheld_limit(asked, asked.would_take, tokens))
        if verdict is not None:
            withheld = (*withheld, *withheld_quota(verdict))
            quota, verdict = _without_quota(quota, verdict, pool, pending), None  # the client is told nothing of it
    if verdict is not None and not verdict.allowed:
        raise _quota_exceeded(verdict)
    if asked.request.kept_response is not None:
        asked = _to_keeper(asked, hits, pool, session=session)
        if pending is not None:
            pending.facts = asked.facts
    prepared = Prepared(
        asked=asked,
        sent=sent,
        tokens=tokens,
        query=query_of(asked, tokens, hits, session=session, degraded=degraded),
        quota=quota,
        verdict=verdict,
        withheld=withheld,
    )
    if pending is not None:
        pending.phase("lookup", pool.clock() - tokenized)
        pending.asked, pending.prepared = asked, prepared
    return prepared


async def _fall_back(
    prepared: Prepared, refusal: NoReadyEndpointError, pool: PoolRuntime, pending: PendingPick | None
) -> Prepared:
    """Prepare the request for the next model that may stand in; raise the refusal where there is none."""
    asked = pool.reader.fall_back(prepared.asked, refusal, adapters=pool.view.endpoints.learned_adapters)
    return await _look_up(asked, pool, pending, before=prepared)


async def _seat(prepared: Prepared, pool: PoolRuntime, pending: PendingPick) -> BookedExchange:
    """Book an endpoint, at once or when there is room, in a pool without a ready one once the first one has come.

    Raise NoReadyEndpointError where none may serve the request.
    """
    began = pool.clock()
    load: list[Withheld] = []  # in shadow

    def look_again(now: float) -> Snapshot:
        pending.queued_seconds = now - began
        return look(pool.view, prepared.query, now=now, others=pool.others())

    def attempt(seen: Snapshot, ceiling: float | None) -> BookedExchange | None:
        found = choose(pool.view, prepared.query, seen, ceiling=ceiling)
        if isinstance(found, Full):
            pool.no_room(found, prepared.asked, seen, pending)
            return None
        prefill = plan_of(prepared, found, pool.view, ceiling=ceiling, races=pool.races)
        withheld = (*prepared.withheld, *load, *withheld_offload(prefill))
        return pool.book(Picked(prepared=prepared, choice=found, prefill=prefill, withheld=withheld), pending)

    while True:
        try:
            return await pool.admission.seat(
                prepared,
                look(pool.view, prepared.query, now=pool.clock()),
                look=look_again,
                attempt=attempt,
                undo=BookedExchange.finish,
                withhold=load.append,
            )
        except NoReadyEndpointError:
            if pool.first_pod is None or not pool.first_pod.is_due():
                raise
        prepared = with_note(prepared, FIRST_POD_NOTE)
        booked = await pool.first_pod.wait(
            prepared,
            arrived_at=pending.arrived_at,
            look=look_again,
            attempt=attempt,
            undo=BookedExchange.finish,
        )
        if booked is not None:
            return booked


async def _prefill(work: PrefillWork, prepared: Prepared, exchange: BookedExchange, pool: PoolRuntime) -> None:
    """Have a prefill pod compute a booked request's prompt. Whatever this raises, the booking is released.

    A decode pod that has gone meanwhile is replaced: nobody has fetched the blocks yet, so that any may.
    """
    assert pool.legs is not None, "who has planned a leg runs it"
    try:
        await pool.legs.run(work, exchange)
        if not pool.serves(exchange.endpoints[0]):
            found = choose(pool.view, prepared.query, look(pool.view, prepared.query, now=pool.clock()), ceiling=None)
            assert isinstance(found, Choice), "without a ceiling there is always a choice"
            exchange.move(found.decision.endpoints[: pool.most_endpoints])
    except BaseException:  # a client that leaves, too
        exchange.finish()
        raise


def _without_quota(
    ask: QuotaAsk | None, verdict: QuotaVerdict, pool: PoolRuntime, pending: PendingPick | None
) -> QuotaAsk | None:
    """Return what a request in shadow has taken from its quota: as without shadow nothing, where it is refused."""
    if verdict.allowed or ask is None:
        return ask
    assert pool.quotas is not None, "it was asked"
    pool.quotas.cancel(ask)
    if pending is not None:
        pending.quota = None
    return None


def _to_keeper(asked: AskedRequest, hits: IndexHits, pool: PoolRuntime, *, session: str | None) -> AskedRequest:
    now = pool.clock()
    endpoints = [status.address for status in pool.view.endpoints.snapshot(now=now)]
    remembered = pool.view.memory.session_place(session, now=now) if session is not None else None
    return to_keeper(asked, hits, endpoints=endpoints, remembered=remembered)


def _quota_exceeded(verdict: QuotaVerdict) -> QuotaExceededError:
    kind = TokenQuotaExceededError if verdict.error_type == "tokens" else QuotaExceededError
    return kind(verdict.message, retry_after_seconds=ceil(max(verdict.wait_seconds, 1.0)), headers=verdict.headers)

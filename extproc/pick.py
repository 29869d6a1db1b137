"""The path of every request, and the module to read first: from a request's bytes to a booked endpoint.

`prepare` reads the request and looks up its prompt. `look` takes a snapshot of the pool's endpoints, and `choose`
decides between them. `PoolRuntime.book` makes a decision take effect. Decisions have no side effects, so `explain` is
the same path without `book`. Every input except the endpoints is optional: the pick then uses the rest, and
`Decision.degraded` names the missing input.
"""

from extproc.admission.asked_request import AskedRequest, most_generated
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
from extproc.choosing.choose import Choice, Full, Snapshot, choose, look
from extproc.errors import (
    DEFECT,
    FirstPodLateError,
    FirstPodNeededError,
    InternalPickError,
    NoReadyEndpointError,
    PickError,
)
from extproc.ext_proc.exchange import NO_HEADERS, RequestFacts
from extproc.pools.booked_exchange import BookedExchange
from extproc.pools.picker_books import SEED
from extproc.pools.pool_runtime import Draft, PoolRuntime
from extproc.pools.prefill_legs import PrefillWork, plan_of
from extproc.prefixes.prompt_match import IndexHits

FIRST_POD_NOTE = "it has waited for the pool's first pod"


async def pick(facts: RequestFacts, body: bytes | None, pool: PoolRuntime) -> BookedExchange:
    """Decide and book, at once or when there is room; `body` is None if Envoy does not send it.

    Raise PickError with the answer for the client.
    """
    draft = pool.begin(facts)
    try:
        prepared = await prepare(body, draft, pool)
        while True:
            try:
                exchange = await _seat(prepared, draft, pool)
                break
            except FirstPodLateError:
                raise  # no model has a pod
            except NoReadyEndpointError as refusal:
                prepared = await _fall_back(prepared, refusal, draft, pool)
    except BaseException as error:  # including the cancellation by a client that leaves
        draft.release()
        anywhere = pool.without_decision(draft, error)
        # break a cycle: its frames hold the body, and some hold the error; a bug's traceback is already logged
        error.__traceback__ = error.__cause__ = error.__context__ = None
        if anywhere is not None:
            return anywhere
        if isinstance(error, Exception) and not isinstance(error, PickError):
            raise InternalPickError(DEFECT, headers=pool.told(draft, NO_HEADERS)) from error
        raise
    finally:
        pool.under_way -= 1
    if draft.prefill is not None:
        try:
            await _prefill(draft.prefill, prepared, exchange, pool)
        except BaseException:
            draft.release()
            raise
    return exchange


async def explain(facts: RequestFacts, body: bytes | None, pool: PoolRuntime) -> tuple[Picked, Preview]:
    """Decide as `pick` does without booking: among the endpoints with room, or among all if none has room.

    Raise PickError with the answer that the client would get.
    """
    draft = pool.draft(facts)
    prepared = await prepare(body, draft, pool)
    while True:
        try:
            snapshot = look(pool.view, prepared.query, now=pool.clock())
            break
        except NoReadyEndpointError as refusal:
            if pool.first_pod is not None and prepared.asked.request.costs_gpu and pool.first_pod.is_due():
                words = pool.first_pod.words(prepared.asked.request_class.priority_class)
                raise FirstPodNeededError(words) from refusal
            prepared = await _fall_back(prepared, refusal, draft, pool)
    ceiling = pool.admission.ceiling(prepared.asked.request_class)
    found = choose(pool.view, prepared.query, snapshot, ceiling=ceiling)
    if isinstance(found, Full):
        found = choose(pool.view, prepared.query, snapshot, ceiling=None)
    assert isinstance(found, Choice), "without a ceiling there is always a choice"
    preview = draft.gate.preview(pool.admission.preview(prepared, pool.view, snapshot))
    prefill = draft.gate.offload(plan_of(prepared, found, pool.view, ceiling=None, races=pool.races))
    return Picked(prepared=prepared, choice=found, prefill=prefill, withheld=tuple(draft.gate.noted)), preview


async def prepare(body: bytes | None, draft: Draft, pool: PoolRuntime) -> Prepared:
    """Read the request and look up its prompt.

    Raise PickError with the answer for the client if the request is refused.
    """
    began = pool.clock()
    adapters = pool.view.endpoints.learned_adapters
    draft.body = came = pool.reader.body_of(draft.facts, body)
    asked = await read(draft.facts, came, pool.reader, pool.long_work, draw=pool.view.random(), adapters=adapters)
    draft.asked = asked
    draft.phase("parse", pool.clock() - began)
    measures_of = pool.pressure.measures if draft.arrival.number else pool.pressure.in_force
    if asked.request.costs_gpu:
        draft.asked = asked = draft.gate.degrade(asked, measures_of, pool.reader, adapters=adapters)
        if draft.arrival.number:  # else it is only explained
            if pool.books.deadly.has_some:
                pool.books.deadly.turn_away(asked.digest(SEED), now=pool.clock())
            pool.admission.turn_away(asked)
    return await _look_up(asked, draft, pool)


async def _look_up(asked: AskedRequest, draft: Draft, pool: PoolRuntime, *, before: Prepared | None = None) -> Prepared:
    """Edit the body and look up the prompt for one model.

    `before` is the request as prepared for an earlier model, which has already asked the quota.
    """
    began = pool.clock()
    degraded: dict[str, str] = {}
    sent = await edit(asked, pool.reader, pool.long_work, degraded=degraded)
    tokens = await prompt_tokens(asked, sent, pool.prompts, models=pool.reader.models, degraded=degraded)
    tokenized = pool.clock()
    draft.phase("tokenize", tokenized - began)
    draft.prompt_tokens = tokens.estimated_tokens
    draft.gate.limit_prompt(asked, tokens)
    session = session_of(asked)
    if before is None:
        quota = pool.ask_quota(asked, sent, draft)
        hits = await prefix_hits(asked, tokens, pool.index, session=session, quota=quota)
        verdict = draft.gate.limit_quota(hits.quota)
        if hits.quota is not None and not hits.quota.allowed:  # refused, and in shadow mode sent all the same
            draft.release()
            quota = None
    else:
        quota, verdict = before.quota, before.verdict
        hits = await prefix_hits(asked, tokens, pool.index, session=session, quota=None)
    kind = asked.answer_kind(session)
    answer = pool.books.answers.expected(kind, most=most_generated(asked, sent))
    if asked.request.kept_response is not None:
        asked = _to_keeper(asked, hits, pool, session=session)
        draft.facts = asked.facts
    prepared = Prepared(
        asked=asked,
        sent=sent,
        tokens=tokens,
        query=query_of(asked, tokens, hits, session=session, degraded=degraded, answer=answer),
        answer_kind=kind,
        quota=quota,
        verdict=verdict,
    )
    draft.phase("lookup", pool.clock() - tokenized)
    draft.asked, draft.prepared = asked, prepared
    return prepared


async def _fall_back(prepared: Prepared, refusal: NoReadyEndpointError, draft: Draft, pool: PoolRuntime) -> Prepared:
    """Prepare the request for the next fallback model; raise the refusal if there is none."""
    asked = pool.reader.fall_back(prepared.asked, refusal, adapters=pool.view.endpoints.learned_adapters)
    return await _look_up(asked, draft, pool, before=prepared)


async def _seat(prepared: Prepared, draft: Draft, pool: PoolRuntime) -> BookedExchange:
    """Book an endpoint, at once or when there is room; a pool without pods first waits for its first pod.

    Raise NoReadyEndpointError if no endpoint may serve the request.
    """
    began = pool.clock()

    def look_again(now: float) -> Snapshot:
        draft.queued_seconds = now - began
        return look(pool.view, prepared.query, now=now, others=pool.others())

    def attempt(seen: Snapshot, ceiling: float | None) -> BookedExchange | None:
        found = choose(pool.view, prepared.query, seen, ceiling=ceiling)
        if isinstance(found, Full):
            pool.no_room(found, prepared.asked, seen, draft)
            return None
        prefill = draft.gate.offload(plan_of(prepared, found, pool.view, ceiling=ceiling, races=pool.races))
        noted = tuple(draft.gate.noted)
        return pool.book(Picked(prepared=prepared, choice=found, prefill=prefill, withheld=noted), draft)

    while True:
        try:
            now = pool.clock()
            seen = look(pool.view, prepared.query, now=now)
            return await pool.admission.seat(prepared, seen, look=look_again, attempt=attempt, gate=draft.gate)
        except NoReadyEndpointError:
            if pool.first_pod is None or not prepared.asked.request.costs_gpu or not pool.first_pod.is_due():
                raise
        prepared = with_note(prepared, FIRST_POD_NOTE)
        arrived_at = draft.arrival.at
        booked = await pool.first_pod.wait(prepared, arrived_at=arrived_at, look=look_again, attempt=attempt)
        if booked is not None:
            return booked


async def _prefill(work: PrefillWork, prepared: Prepared, exchange: BookedExchange, pool: PoolRuntime) -> None:
    """Have a prefill pod compute a booked request's prompt.

    A decode pod that has gone meanwhile is replaced: the blocks have not been fetched yet, so any decode pod may.
    """
    assert pool.legs is not None, "who has planned a leg runs it"
    await pool.legs.run(work, exchange)
    if not pool.serves(exchange.endpoints[0]):
        found = choose(pool.view, prepared.query, look(pool.view, prepared.query, now=pool.clock()), ceiling=None)
        assert isinstance(found, Choice), "without a ceiling there is always a choice"
        picked = Picked(prepared=prepared, choice=found)
        exchange.move(*picked.sent_to(pool.books.ranks, pool.most_endpoints))


def _to_keeper(asked: AskedRequest, hits: IndexHits, pool: PoolRuntime, *, session: str | None) -> AskedRequest:
    now = pool.clock()
    endpoints = [status.address for status in pool.view.endpoints.snapshot(now=now)]
    remembered = pool.view.memory.session_place(session, now=now) if session is not None else None
    key = pool.books.response_key
    return to_keeper(asked, hits, endpoints=endpoints, remembered=remembered, key=key)

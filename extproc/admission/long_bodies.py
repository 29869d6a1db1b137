"""Reads and edits bodies without delaying other requests: a long one in the worker thread, at its tenant's turn."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from extproc.admission.asked_request import AskedRequest, RequestReader, SentBody
from extproc.admission.classify import tenant_of
from extproc.errors import LongBodiesLimitedError
from extproc.ext_proc.exchange import RequestFacts
from extproc.requests.client_body import ClientBody
from extproc.requests.long_work import LongWork, LongWorkError

_T = TypeVar("_T")


async def read(
    facts: RequestFacts,
    body: ClientBody | None,
    reader: RequestReader,
    long_work: LongWork,
    *,
    draw: float,
    adapters: Mapping[str, str],
) -> AskedRequest:
    """Parse the request and return it as `RequestReader.ask` does. Raise PickError like that."""
    if body is not None and body.is_long:
        tenant = tenant_of(facts, reader.policy)
        request = await _away(lambda: reader.parse(facts, body), body, long_work, tenant=tenant)
    else:
        request = reader.parse(facts, body)
    return reader.ask(facts, body, request, draw=draw, adapters=adapters)


async def edit(
    asked: AskedRequest, reader: RequestReader, long_work: LongWork, *, degraded: dict[str, str]
) -> SentBody:
    """Return the body for the pod, as `RequestReader.edit` does."""
    body = asked.body
    if body is None or not body.is_long or not reader.changes(asked):
        return reader.edit(asked, degraded=degraded)
    tenant = asked.request_class.tenant
    return await _away(lambda: reader.edit(asked, degraded=degraded), body, long_work, tenant=tenant)


async def _away(work: Callable[[], _T], body: ClientBody, long_work: LongWork, *, tenant: str) -> _T:
    try:
        return await long_work.run(work, size=len(body.raw), tenant=tenant)
    except LongWorkError as error:
        raise LongBodiesLimitedError(
            f"the request body takes long to read, and {error}; try again later", retry_after_seconds=1
        ) from None

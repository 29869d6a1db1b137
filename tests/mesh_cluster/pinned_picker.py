"""`kvmesh extproc` with what the conformance suite asks of its own picker; it is run as a module, with its arguments.

A header of the request names the addresses among which it may pick (the suite's `header-based-testing-filter`): here
it becomes the protocol's subset hint. The answer tells who has served (`destination-endpoint-served-verifier`).
"""

from typing import Any
from unittest.mock import patch

import msgspec

from extproc.ext_proc import answers
from extproc.ext_proc.exchange import RequestFacts
from extproc.ext_proc.messages import HeadersMessage
from extproc.pools.booked_exchange import BookedExchange
from operate.cli import main

PIN_HEADER, SERVED_HEADER = "test-epp-endpoint-selection", "x-conformance-test-served-endpoint"
PORTS = (3000, 3002, 3004)  # of the suite's pools


plain_facts, plain_headers, plain_responded = answers.request_facts, answers.wanted_headers, BookedExchange.responded


def pinned_facts(message: HeadersMessage, **more: Any) -> RequestFacts:
    facts = plain_facts(message, **more)
    named = message.headers.get(PIN_HEADER)
    if named is None:
        return facts
    addresses = [name.strip() for name in named.split(",")]
    allowed = {name for name in addresses if ":" in name} | {f"{ip}:{port}" for ip in addresses for port in PORTS}
    return msgspec.structs.replace(facts, subset=frozenset(allowed))


def headers_and_pin(*given: frozenset[str]) -> frozenset[str]:
    return plain_headers(*given) | {PIN_HEADER}


def responded_and_told(exchange: BookedExchange, *, served_by: str | None, **more: Any) -> None:
    plain_responded(exchange, served_by=served_by, **more)
    if served_by is not None:
        exchange.response_headers = {**exchange.response_headers, SERVED_HEADER: served_by}


if __name__ == "__main__":
    with (
        patch.object(answers, "request_facts", pinned_facts),
        patch.object(answers, "wanted_headers", headers_and_pin),
        patch.object(BookedExchange, "responded", responded_and_told),
    ):
        main()

"""A real Envoy with the filter of Istio's native InferencePools: both bodies duplex, and nothing sent but metadata.

As pilot/pkg/xds/filters and pilot/pkg/networking/core/route of Istio 1.31 write it.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from extproc.disaggregation.transfer_protocols import NO_RETRIES
from extproc.ext_proc.exchange import RequestFacts
from extproc.pools.booked_exchange import BookedExchange
from tests.integration.scripted_picker import (
    DOCUMENT,
    DUPLEX,
    EVENTS,
    REWRITE,
    comparison,
    document,
    events_in_pieces,
    mesh,
    predicted,
    rewritten,
)

CALLED_AS = "outbound|9002||picker-a.llm.svc.cluster.local"
EXT_PROC = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3"


def as_istio(manager: dict[str, Any]) -> None:
    """Put Istio's filter in the place of ours, and its override on the route."""
    forwarded = {"untyped": ["envoy.lb"]}
    native = {
        "@type": f"{EXT_PROC}.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "dummy"}, "timeout": "10s"},
        "failure_mode_allow": True,
        "processing_mode": {"request_header_mode": "SKIP", "response_header_mode": "SKIP"},
        "message_timeout": "1000s",
        "metadata_options": {"receiving_namespaces": forwarded, "forwarding_namespaces": forwarded},
    }
    override = {
        "@type": f"{EXT_PROC}.ExtProcPerRoute",
        "overrides": {
            "failure_mode_allow": False,
            # istiod names the cluster so, and Envoy the authority after the cluster
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker", "authority": CALLED_AS}},
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": "FULL_DUPLEX_STREAMED",
                "request_trailer_mode": "SEND",
                "response_header_mode": "SEND",
                "response_body_mode": "FULL_DUPLEX_STREAMED",
                "response_trailer_mode": "SEND",
            },
        },
    }
    name = "envoy.filters.http.ext_proc"
    router = manager["http_filters"][-1]
    manager["http_filters"] = [{"name": name, "typed_config": native}, router]
    [route] = manager["route_config"]["virtual_hosts"][0]["routes"]
    route["typed_per_filter_config"] = {name: override}


async def test_the_name_of_the_pools_service_arrives(tmp_path: Path) -> None:
    asked: list[RequestFacts] = []
    async with mesh(DUPLEX, tmp_path, document, edit=as_istio) as running:
        pick = running.books.pick

        async def seen(facts: RequestFacts, body: bytes | None) -> BookedExchange:
            asked.append(facts)
            return await pick(facts, body)

        running.books.pick = seen  # type: ignore[method-assign]
        async with running.post() as response:
            assert (response.status, await response.read()) == (200, DOCUMENT)
        await running.all_released()
        assert [facts.called_as for facts in asked] == [CALLED_AS]
        assert running.books.answered == [(running.pod, False)]


async def test_names_are_put_back_in_documents_and_streams(tmp_path: Path) -> None:
    answers = {b'{"n":1}': document, b'{"n":2}': events_in_pieces}

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return await answers[body](request, body)

    async with mesh(DUPLEX, tmp_path, answer, edit=as_istio) as running:
        running.books.plan = REWRITE
        for body, content in zip(answers, (DOCUMENT, EVENTS), strict=True):
            async with running.post(body) as response:
                assert await response.read() == rewritten(content)
        await running.all_released()
        assert (running.books.released, running.books.misses) == ([(running.pod, 200)] * 2, [])


@pytest.mark.parametrize("is_stream", [True, False])
async def test_usage_is_read_and_a_long_answer_passes_unchanged(is_stream: bool, tmp_path: Path) -> None:
    answer = events_in_pieces if is_stream else document
    async with mesh(DUPLEX, tmp_path, answer, edit=as_istio) as running:
        running.books.plan = predicted(running.pod, sampled=True)
        async with running.post(b'{"prompt":"' + b"x" * 300_000 + b'"}') as response:
            assert await response.read() == (EVENTS if is_stream else DOCUMENT)
        await running.all_released()
        assert (running.books.comparisons, running.books.misses) == ([comparison(running.pod)], [])


async def test_after_a_retry_the_booking_follows_the_pod_that_served(tmp_path: Path) -> None:
    async with mesh(DUPLEX, tmp_path, document, edit=as_istio) as running:
        running.books.endpoints = (running.dead_pod, running.other_pod, running.pod)
        async with running.post() as response:
            assert response.status == 200
        await running.all_released()
        assert running.books.answered == [(running.dead_pod, True), (running.other_pod, False)]
        assert running.books.released == [(running.other_pod, 200)]


async def test_that_a_request_is_not_to_be_repeated_is_ignored_and_the_request_goes_on(tmp_path: Path) -> None:
    async with mesh(DUPLEX, tmp_path, document, edit=as_istio) as running:
        running.books.set_headers = NO_RETRIES
        running.books.endpoints = (running.dead_pod, running.pod)
        async with running.post() as response:
            assert (response.status, await response.read()) == (200, DOCUMENT)


async def test_trailers_of_the_pod_pass(tmp_path: Path) -> None:
    async def with_trailers(request: web.Request, _: bytes) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\ntrailer: x-end\r\n\r\n"
            + b"%x\r\n%b\r\n0\r\nx-end: 1\r\n\r\n" % (len(DOCUMENT), DOCUMENT)
        )
        request.transport.close()
        return web.Response()

    async with mesh(DUPLEX, tmp_path, with_trailers, edit=as_istio) as running:
        running.books.plan = REWRITE
        async with running.post() as response:
            assert await response.read() == rewritten(DOCUMENT)
        await running.all_released()


async def test_a_client_that_leaves_in_the_middle_leaves_no_booking(tmp_path: Path) -> None:
    async def endless(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[:29])
        await asyncio.Event().wait()
        return response

    async with mesh(DUPLEX, tmp_path, endless, edit=as_istio) as running:
        running.books.plan = predicted(running.pod, sampled=True)
        async with running.post() as response:
            assert await response.content.read(29) == EVENTS[:29]
            assert running.books.open == 1
            response.close()
        await running.all_released()
        assert len(running.books.released) == 1

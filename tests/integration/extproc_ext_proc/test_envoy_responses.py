"""A real Envoy before our gRPC server: changed requests, responses that are read or changed, and who is blamed.

In both body modes: FULL_DUPLEX_STREAMED, where a second filter has the responses, and BUFFERED, where the pick's own
stream asks for them.
"""

import asyncio
import gzip
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from extproc.ext_proc import messages as ext_proc_messages
from extproc.ext_proc.call import NOTES_WITHOUT_RESPONSE
from extproc.ext_proc.grpc_server import Transport
from operate.install.envoy_filters import NOTE_HEADER, RESPONSE_FILTER
from tests.integration.grpc_servers import on_both_servers
from tests.integration.scripted_picker import (
    BOTH,
    BUFFERED,
    DEADLINE_SECONDS,
    DOCUMENT,
    DUPLEX,
    EVENTS,
    REWRITE,
    as_the_pod_has_it,
    comparison,
    document,
    events_in_pieces,
    mesh,
    predicted,
    rewritten,
    until,
)


@pytest.mark.parametrize("file", BOTH)
@on_both_servers
async def test_a_changed_request_arrives_whole_and_its_json_answer_has_the_clients_name(
    file: str, transport: type[Transport], tmp_path: Path
) -> None:
    prompt = "x" * 300_000
    async with mesh(file, tmp_path, document, transport=transport) as running:
        running.books.plan, running.books.change = REWRITE, as_the_pod_has_it
        for size in (0, len(prompt)):
            async with running.post(json.dumps({"model": "gpt-x", "prompt": prompt[:size]}).encode()) as response:
                content = await response.read()

            assert (response.status, content) == (200, rewritten(DOCUMENT))
            assert "content-length" not in response.headers
            assert json.loads(running.received[-1][1]) == {"model": "org/model-a", "prompt": prompt[:size]}
        await running.all_released()
        assert running.books.misses == []
        assert running.books.released == [(running.pod, 200)] * 2


@pytest.mark.parametrize("file", BOTH)
async def test_every_message_of_a_real_envoy_is_in_the_form_that_is_read_by_hand(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_to_the_library = []
    monkeypatch.setattr(ext_proc_messages, "_by_library", lambda message, _: left_to_the_library.append(message))
    async with mesh(file, tmp_path, document) as running:
        running.books.plan, running.books.change = REWRITE, as_the_pod_has_it
        async with running.post(json.dumps({"model": "gpt-x", "prompt": "x" * 100_000}).encode()) as response:
            assert await response.read() == rewritten(DOCUMENT)
        await running.all_released()
    assert left_to_the_library == []


@pytest.mark.parametrize("file", BOTH)
async def test_an_event_stream_that_is_cut_anywhere_has_the_clients_name(file: str, tmp_path: Path) -> None:
    async with mesh(file, tmp_path, events_in_pieces) as running:
        running.books.plan = REWRITE

        async with running.post() as response:
            content = await response.read()

        assert content == rewritten(EVENTS)
        await running.all_released()
        assert running.books.misses == []


@pytest.mark.parametrize("file", BOTH)
async def test_a_rewritten_event_reaches_the_client_before_the_next_one_is_made(file: str, tmp_path: Path) -> None:
    first_arrived = asyncio.Event()
    first, rest = EVENTS.split(b"\n\n", 1)

    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first + b"\n\n")
        await first_arrived.wait()
        await response.write(rest)
        return response

    async with mesh(file, tmp_path, answer) as running:
        running.books.plan = REWRITE
        async with running.post() as response:
            assert await response.content.readuntil(b"\n\n") == rewritten(first) + b"\n\n"
            first_arrived.set()
            assert await response.content.read() == rewritten(rest)


@pytest.mark.parametrize("file", BOTH)
async def test_a_large_answer_that_names_its_model_last_is_rewritten(file: str, tmp_path: Path) -> None:
    content = b'{"type":"message","content":[{"input":{"model":"org/model-a"}},"' + b"y" * 700_000 + b'"],'

    async def answer(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(body=content + b'"model": "org/model-a"}', content_type="application/json")

    async with mesh(file, tmp_path, answer) as running:
        running.books.plan = REWRITE
        async with running.post() as response:
            assert await response.read() == content + b'"model": "gpt-x"}'


@pytest.mark.parametrize("file", BOTH)
async def test_a_response_that_nobody_needs_does_not_reach_the_picker(file: str, tmp_path: Path) -> None:
    async with mesh(file, tmp_path, document) as running:
        async with running.post() as response:
            content = await response.read()

        await running.all_released()
        assert (content, response.headers["content-length"]) == (DOCUMENT, str(len(DOCUMENT)))
        assert await running.streams_started("kvmesh") == 1
        assert await running.streams_started("kvmesh_response") == 0


@pytest.mark.parametrize("file", BOTH)
@pytest.mark.parametrize("manner", ["sampled stream", "sampled document", "small document"])
async def test_a_response_that_is_read_passes_unchanged_and_is_compared_with_its_prediction(
    file: str, manner: str, tmp_path: Path
) -> None:
    is_stream = manner == "sampled stream"
    async with mesh(file, tmp_path, events_in_pieces if is_stream else document) as running:
        how: dict[str, Any] = {"sampled": True} if manner.startswith("sampled") else {"read_below_bytes": 1000}
        running.books.plan = predicted(running.pod, **how)

        async with running.post() as response:
            content = await response.read()

        assert content == (EVENTS if is_stream else DOCUMENT)
        assert response.headers.get("content-length") == (None if is_stream else str(len(DOCUMENT)))
        await running.all_released()
        assert (running.books.comparisons, running.books.misses) == ([comparison(running.pod)], [])


@pytest.mark.parametrize("file", BOTH)
async def test_a_document_above_the_size_and_a_stream_that_is_not_sampled_are_let_go(file: str, tmp_path: Path) -> None:
    answers = {b"document": document, b"stream": events_in_pieces}

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return await answers[body](request, body)

    async with mesh(file, tmp_path, answer) as running:
        running.books.plan = predicted(running.pod, read_below_bytes=len(DOCUMENT) - 1)
        contents = []
        for kind in answers:
            async with running.post(kind) as response:
                contents.append(await response.read())

        assert contents == [DOCUMENT, EVENTS]
        await running.all_released()
        assert (running.books.comparisons, running.books.misses) == ([], [])


@pytest.mark.parametrize("file", BOTH)
async def test_a_decoded_body_arrives_without_the_header_that_called_it_compressed(file: str, tmp_path: Path) -> None:
    async with mesh(file, tmp_path, document) as running:
        running.books.change = gzip.decompress
        running.books.removed_headers = ("content-encoding",)

        body = b'{"prompt": "' + b"z" * 100_000 + b'"}'
        async with running.post(gzip.compress(body), headers={"content-encoding": "gzip"}) as response:
            assert response.status == 200

        headers, received = running.received[0]
        assert (received, headers.get("content-encoding")) == (body, None)


@pytest.mark.parametrize("file", BOTH)
async def test_the_pod_that_really_served_holds_the_booking_and_the_dead_one_is_blamed(
    file: str, tmp_path: Path
) -> None:
    async with mesh(file, tmp_path, document) as running:
        running.books.endpoints = (running.dead_pod, running.other_pod, running.pod)
        running.books.plan = predicted(running.dead_pod, sampled=True)

        async with running.post() as response:
            assert response.status == 200

        await running.all_released()
        assert running.books.answered == [(running.dead_pod, True), (running.other_pod, False)]
        assert running.books.released == [(running.other_pod, 200)]
        assert (running.books.comparisons, running.books.misses) == ([], ["served-elsewhere"])


@pytest.mark.parametrize("file", BOTH)
async def test_envoys_own_503_is_the_failure_of_the_pod_that_could_not_be_reached(file: str, tmp_path: Path) -> None:
    def without_retries(manager: dict[str, Any]) -> None:
        del manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["retry_policy"]

    async with mesh(file, tmp_path, document, edit=without_retries) as running:
        running.books.endpoints = (running.dead_pod,)
        running.books.plan = REWRITE

        async with running.post() as response:
            assert response.status == 503

        await running.all_released()
        assert running.books.answered == [(running.dead_pod, True)]
        assert (running.books.released, running.books.misses) == ([(running.dead_pod, 503)], [])


@pytest.mark.parametrize("file", BOTH)
async def test_an_error_of_the_pod_passes_as_it_is(file: str, tmp_path: Path) -> None:
    async def answer(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(status=404, body=DOCUMENT, content_type="application/json")

    async with mesh(file, tmp_path, answer) as running:
        running.books.plan = REWRITE

        async with running.post() as response:
            assert (response.status, await response.read()) == (404, DOCUMENT)

        assert running.books.answered == [(running.pod, False)]


async def test_a_pods_own_note_is_not_heard_and_no_note_reaches_the_client(tmp_path: Path) -> None:
    async def noting(_: web.Request, __: bytes) -> web.StreamResponse:
        return web.Response(body=DOCUMENT, content_type="application/json", headers={NOTE_HEADER: "mine"})

    async with mesh(DUPLEX, tmp_path, noting) as running:
        async with running.post() as response:
            assert NOTE_HEADER not in response.headers
        assert await running.streams_started("kvmesh_response") == 0
        running.books.plan = predicted(running.pod, sampled=True)
        async with running.post() as response:
            assert await response.read() == DOCUMENT
            assert NOTE_HEADER not in response.headers
        assert await running.streams_started("kvmesh_response") == 1


async def test_duplex_bodies_without_the_filter_for_responses_are_noticed(tmp_path: Path) -> None:
    def without_it(manager: dict[str, Any]) -> None:
        manager["http_filters"] = [each for each in manager["http_filters"] if each["name"] != RESPONSE_FILTER]

    async with mesh(DUPLEX, tmp_path, document, edit=without_it) as running:
        running.books.plan = REWRITE
        for _ in range(NOTES_WITHOUT_RESPONSE):
            assert not running.books.misses
            async with running.post() as response:
                assert await response.read() == DOCUMENT
        await running.all_released()
        assert running.books.misses == ["no-response-filter"]


async def test_an_envoy_that_does_not_allow_the_picker_to_ask_is_noticed(tmp_path: Path) -> None:
    def without_leave(manager: dict[str, Any]) -> None:
        del manager["http_filters"][0]["typed_config"]["allow_mode_override"]

    async with mesh(BUFFERED, tmp_path, document, edit=without_leave) as running:
        running.books.plan = predicted(running.pod, sampled=True)
        async with running.post() as response:
            assert await response.read() == DOCUMENT
        await running.all_released()
        assert running.books.misses == ["not-delivered"]


@pytest.mark.parametrize("file", BOTH)
@on_both_servers
async def test_a_picker_that_stops_does_not_cut_a_stream_that_it_rewrites(
    file: str, transport: type[Transport], tmp_path: Path
) -> None:
    half_way, go_on = asyncio.Event(), asyncio.Event()
    cut = EVENTS.index(b"model-a") + 3

    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[:cut])
        half_way.set()
        await go_on.wait()
        await response.write(EVENTS[cut:])
        return response

    async with mesh(file, tmp_path, answer, transport=transport) as running:
        running.books.plan = REWRITE
        async with running.post() as response:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await half_way.wait()
            # the beginning of an event is with the picker
            await until(lambda: any(call._holds_back() for call in running.server.calls.open))
            running.server.release_answered()
            go_on.set()
            content = await response.read()

        # the event that was held back is whole; those behind it may have passed without us
        assert content in {
            rewritten(EVENTS),
            rewritten(EVENTS[: EVENTS.index(b"\n\n")]) + EVENTS[EVENTS.index(b"\n\n") :],
        }


@pytest.mark.parametrize("file", BOTH)
async def test_a_body_right_behind_its_headers_is_not_lost(file: str, tmp_path: Path) -> None:
    turns = count()

    async def in_two_packets(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.content_length = len(DOCUMENT)
        await response.prepare(request)
        await response.write(DOCUMENT[:0])
        await asyncio.sleep(next(turns) % 50 * 0.0002)  # some of them come while Envoy waits for the picker
        await response.write(DOCUMENT)
        return response

    async with mesh(file, tmp_path, in_two_packets) as running:
        running.books.plan = predicted(running.pod, sampled=True)
        for _ in range(200):
            async with asyncio.timeout(5), running.post() as response:
                assert await response.read() == DOCUMENT
        await running.all_released()
        assert len(running.books.comparisons) == 200

"""The pods' pages over kept connections: what is kept, what is given up, and what nobody may be left with."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from kvmesh.pods.http_response import HttpResponse, ResponseReader
from kvmesh.pods.pod_http import BYTES_A_READ, CRUMB_SECONDS, READS_AT_ONCE, PodPages
from tests.integration.kube_documents import eventually

PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


class Pod:
    """Answers when it is told to, with the number of the request."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0  # that were made
        self.open = 0
        self.asked = 0
        self.posted = b""
        self.answers = asyncio.Event()
        self.says_goodbye = False  # closes after each answer without a word
        self.answers.set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST"):
                    length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
                    self.posted = await reader.readexactly(length)
                self.asked += 1
                mine = self.asked
                await self.answers.wait()
                writer.write(PAGE + b"%02d" % mine)
                if self.says_goodbye:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    pod = Pod()
    server = await asyncio.start_server(pod.serve, "127.0.0.1", 0)
    pod.port = server.sockets[0].getsockname()[1]
    yield pod
    server.close()


@pytest.fixture
async def pages(pod: Pod) -> AsyncIterator[PodPages]:
    pages = PodPages()
    yield pages
    pages.close()
    await eventually(lambda: pod.open == 0)


async def ask(pages: PodPages, pod: Pod, *, timeout_seconds: float = 5.0) -> bytes:
    answer = await pages.get(pod.endpoint, "/x", timeout_seconds=timeout_seconds, max_body_bytes=100)
    return answer.body


async def test_one_connection_carries_one_question_after_another(pod: Pod, pages: PodPages) -> None:
    assert [await ask(pages, pod) for _ in range(3)] == [b"01", b"02", b"03"]
    assert pod.connections == 1


async def test_questions_with_a_body_go_the_same_way(pod: Pod, pages: PodPages) -> None:
    body = b"x" * (1 << 20)
    answer = await pages.post(pod.endpoint, "/x", body, timeout_seconds=5.0, max_body_bytes=100)
    assert (answer.body, pod.posted == body) == (b"01", True)
    assert await ask(pages, pod) == b"02"
    assert pod.connections == 1


async def test_as_many_connections_are_kept_as_the_caller_wants(pod: Pod) -> None:
    pages = PodPages(most_kept=2)
    pod.answers.clear()
    asking = [asyncio.create_task(ask(pages, pod)) for _ in range(3)]
    await eventually(lambda: pod.asked == 3)
    pod.answers.set()
    await asyncio.gather(*asking)
    await eventually(lambda: pod.open == 2)
    await asyncio.gather(*(ask(pages, pod) for _ in range(2)))
    assert pod.connections == 3
    pages.keep(())
    await eventually(lambda: pod.open == 0)


async def test_a_connection_that_the_pod_closed_meanwhile_costs_no_answer(pod: Pod, pages: PodPages) -> None:
    pod.says_goodbye = True
    assert [await ask(pages, pod) for _ in range(3)] == [b"01", b"02", b"03"]
    assert pod.connections == 3


async def test_a_late_answer_is_never_taken_for_the_next_one(pod: Pod, pages: PodPages) -> None:
    pod.answers.clear()
    with pytest.raises(TimeoutError):
        await ask(pages, pod, timeout_seconds=0.1)
    pod.answers.set()

    assert await ask(pages, pod) == b"02"
    assert pod.connections == 2


async def test_a_pod_that_is_forgotten_while_it_answers_leaves_no_connection(pod: Pod, pages: PodPages) -> None:
    pod.answers.clear()
    asking = asyncio.create_task(ask(pages, pod))
    await eventually(lambda: pod.asked == 1)
    pages.forget(pod.endpoint)
    pod.answers.set()

    assert await asking == b"01"
    await eventually(lambda: pod.open == 0)


async def test_an_answer_in_crumbs_is_read_now_and_then() -> None:
    parts = 0

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal parts
        with suppress(ConnectionError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                parts += 1
                await asyncio.sleep(0)
        writer.close()

    reads = 0
    feed = ResponseReader.feed

    def counted(self: ResponseReader, data: bytes) -> HttpResponse | None:
        nonlocal reads
        reads += 1
        return feed(self, data)

    server = await asyncio.start_server(drips, "127.0.0.1", 0)
    pages = PodPages()
    endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(ResponseReader, "feed", counted)
        await pages.get(endpoint, "/x", timeout_seconds=0.5, max_body_bytes=1 << 20)
    pages.close()
    server.close()
    assert parts > 4 * reads
    assert reads <= READS_AT_ONCE + 0.5 / CRUMB_SECONDS + parts // BYTES_A_READ + 1

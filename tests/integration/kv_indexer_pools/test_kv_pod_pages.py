"""The pods' pages over kept connections: what is kept, what is given up, and what nobody may be left with."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvmesh.pods.pod_http import PodPages
from tests.integration.kube_documents import eventually

PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


class Pod:
    """Answers when it is told to, with the number of the request."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0  # that were made
        self.open = 0
        self.asked = 0
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
                await reader.readuntil(b"\r\n\r\n")
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

"""A server that speaks the Redis protocol and answers as a test wants: for states that real ones are rarely in."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import hiredis

Answer = Callable[[list[bytes]], bytes | None]  # None: no answer, ever

OK, PONG, MASTER = b"+OK\r\n", b"+PONG\r\n", b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"


def error(text: str) -> bytes:
    return f"-{text}\r\n".encode()


def array(*items: bytes | int) -> bytes:
    parts = [b":%d\r\n" % item if isinstance(item, int) else b"$%d\r\n%s\r\n" % (len(item), item) for item in items]
    return b"*%d\r\n%s" % (len(items), b"".join(parts))


def replica_of(port: int) -> bytes:
    return b"*5\r\n$5\r\nslave\r\n$9\r\n127.0.0.1\r\n:%d\r\n$9\r\nconnected\r\n:0\r\n" % port


class FakeRedis:
    """Answers ROLE, AUTH, SELECT and PING by itself; all else, and these too if it wants, the test does."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.commands: list[list[bytes]] = []
        self.connections = 0
        self.gate: asyncio.Event | None = None  # nothing is answered before
        self.greeting = b""  # said unasked, and the connection is closed
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def asked(self, name: bytes) -> list[list[bytes]]:
        """The commands of that name, in the order in which they came."""
        return [command for command in self.commands if command[0] == name]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.greeting:
            writer.write(self.greeting)
            writer.close()
            return
        parser = hiredis.Reader()
        try:
            while data := await reader.read(65536):
                parser.feed(data)
                if self.gate is not None:
                    await self.gate.wait()
                while (command := parser.gets()) is not False:
                    self.commands.append(command)
                    writer.write(self._reply(command))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _reply(self, command: list[bytes]) -> bytes:
        given = self.answer(command)
        if given is None:
            return b""
        return given or {b"ROLE": MASTER, b"PING": PONG}.get(command[0], OK)


@asynccontextmanager
async def fake_redis(answer: Answer | None = None) -> AsyncIterator[FakeRedis]:
    """Serve until the block ends; an empty answer stands for the usual one."""
    fake = FakeRedis(answer or (lambda command: b""))
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()

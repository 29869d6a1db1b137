"""What a Kubernetes API is told of the sender: a token that is never old, and who asks."""

from collections.abc import Sequence
from pathlib import Path

import httpx2

from kvmesh import __version__
from kvmesh.documents.kubernetes_headers import SenderHeaders, TokenFile


class Api(httpx2.AsyncBaseTransport):
    """Answers with these statuses, one after another, and keeps what it was sent."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.seen: list[tuple[str, str]] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.seen.append((request.headers["User-Agent"], request.headers["Authorization"]))
        return httpx2.Response(self.statuses.pop(0))


async def ask(sender: SenderHeaders, times: int = 1) -> None:
    for _ in range(times):
        headers = {"Authorization": "Bearer read-long-ago", "User-Agent": "python-httpx"}
        await sender.handle_async_request(httpx2.Request("GET", "https://api/", headers=headers))


def tokens_seen(seen: Sequence[tuple[str, str]]) -> list[str]:
    return [authorization.removeprefix("Bearer ") for _, authorization in seen]


async def test_a_token_is_read_anew_after_a_minute_without_a_refusal(tmp_path: Path) -> None:
    file = tmp_path / "token"
    now = [0.0]
    api = Api(*[200] * 4)
    sender = SenderHeaders(api, program="kvmesh-picker", tokens=TokenFile(file, clock=lambda: now[0]))
    file.write_text("first\n")
    await ask(sender)
    file.write_text("second\n")
    now[0] = 59.9
    await ask(sender)
    now[0] = 60.0
    await ask(sender)
    file.unlink()  # while it is replaced
    now[0] = 130.0
    await ask(sender)
    assert tokens_seen(api.seen) == ["first", "first", "second", "second"]
    assert {agent for agent, _ in api.seen} == {f"kvmesh-picker/{__version__}"}


async def test_a_token_that_is_refused_is_read_at_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    api = Api(401, 200)
    sender = SenderHeaders(api, program="kvmesh", tokens=TokenFile(file, clock=lambda: 0.0))
    await ask(sender)
    file.write_text("new")
    await ask(sender)
    assert tokens_seen(api.seen) == ["old", "new"]


async def test_without_a_token_file_the_credentials_stay_as_they_are() -> None:
    api = Api(200)
    await ask(SenderHeaders(api, program="kvmesh", tokens=None))
    assert tokens_seen(api.seen) == ["read-long-ago"]

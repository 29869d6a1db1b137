"""A Kubernetes API is shown a token that is never old."""

from pathlib import Path

import httpx2

from kvmesh.documents.kubernetes_client import FreshToken, TokenFile


class Api(httpx2.AsyncBaseTransport):
    """Answers with these statuses, one after another, and keeps what it was sent."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.seen: list[str] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.seen.append(request.headers["Authorization"].removeprefix("Bearer "))
        return httpx2.Response(self.statuses.pop(0))


async def ask(sender: FreshToken, times: int = 1) -> None:
    for _ in range(times):
        headers = {"Authorization": "Bearer read-long-ago"}
        await sender.handle_async_request(httpx2.Request("GET", "https://api/", headers=headers))


async def test_a_token_is_read_anew_after_a_minute_without_a_refusal(tmp_path: Path) -> None:
    file = tmp_path / "token"
    now = [0.0]
    api = Api(*[200] * 4)
    sender = FreshToken(api, TokenFile(file, clock=lambda: now[0]))
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
    assert api.seen == ["first", "first", "second", "second"]


async def test_a_token_that_is_refused_is_read_at_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    api = Api(401, 200)
    sender = FreshToken(api, TokenFile(file, clock=lambda: 0.0))
    await ask(sender)
    file.write_text("new")
    await ask(sender)
    assert api.seen == ["old", "new"]


async def test_without_a_token_file_the_credentials_stay_as_they_are() -> None:
    api = Api(200)
    await ask(FreshToken(api, None))
    assert api.seen == ["read-long-ago"]

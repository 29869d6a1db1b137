"""Who is let in to the admin pages of picker and indexer: real servers, real requests."""

import asyncio
import gzip
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.admin.admin_access import TRIES_AT_ONCE, AdminAccess
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.errors import SettingError
from tests.integration.admin_doors import BOTH_ROLES, HOST, Door, Pages, picker_door

TOKEN = "correct-horse-battery"
NEXT = "staple-correct-horse-battery"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def access(tmp_path: Path) -> AdminAccess:
    write(tmp_path / "token", TOKEN)
    return AdminAccess(token_file=tmp_path / "token")


def write(path: Path, text: str) -> None:
    """Replace the file at once, as Kubernetes does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@asynccontextmanager
async def client(port: int) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(f"http://{HOST}:{port}", timeout=timeout) as http:
        yield http


async def asked(http: aiohttp.ClientSession, path: str, *, method: str = "GET", **more: Any) -> tuple[int, str]:
    """Return the status and, of a refusal, the reason."""
    async with http.request(method, path, **more) as answer:
        is_json = answer.content_type == "application/json"
        said: Any = await answer.json() if is_json else {}
        if answer.status >= 400:
            assert set(said) == {"error", "reason"}, "errors are JSON, with words and a reason"
            return answer.status, said["reason"]
        return answer.status, ""


@BOTH_ROLES
async def test_on_loopback_without_anything_set_up_the_pages_are_open_to_this_machines_names(
    door: Door, page: str
) -> None:
    async with door() as port, client(port) as http:
        assert await asked(http, page) == (200, "")
        assert await asked(http, page, headers={"Host": "evil.example.com"}) == (403, "strange-host")
        assert await asked(http, "/metrics", headers={"Host": "evil.example.com"}) == (403, "strange-host")
        assert await asked(http, "/healthz", headers={"Host": "evil.example.com"}) == (200, "")


@BOTH_ROLES
async def test_bound_elsewhere_without_anything_set_up_the_pages_are_closed_and_the_log_says_so_once(
    door: Door, page: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with door(host="0.0.0.0") as port, client(port) as http:
        assert await asked(http, page) == (403, "access-not-set-up")
        assert await asked(http, page, headers=bearer(TOKEN)) == (403, "access-not-set-up")
        assert [(await asked(http, each))[0] for each in ("/healthz", "/readyz", "/metrics")] == [200, 200, 200]
    loud = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.message for record in loud if "ADMIN PAGES ARE CLOSED" in record.message] == [
        record.message for record in loud
    ]
    assert len(loud) == 1
    assert "--admin-token-file" in loud[0].message


@BOTH_ROLES
async def test_a_token_opens_the_pages_and_nothing_else_does(door: Door, page: str, access: AdminAccess) -> None:
    async with door(access) as port, client(port) as http:
        assert await asked(http, page, headers=bearer(TOKEN)) == (200, "")
        assert await asked(http, page, headers={"Authorization": f"bearer  {TOKEN}"}) == (200, "")
        assert await asked(http, page) == (401, "token-missing")
        assert await asked(http, page, headers={"Authorization": f"Basic {TOKEN}"}) == (401, "token-missing")
        assert await asked(http, page, headers=bearer(TOKEN[:-1])) == (401, "token-wrong")
        assert await asked(http, page, headers=bearer(TOKEN + "é")) == (401, "token-wrong")
        assert await asked(http, f"{page}?token={TOKEN}") == (401, "token-missing")
        assert await asked(http, page, headers={"Cookie": f"token={TOKEN}"}) == (401, "token-missing")
        for each in ("/healthz", "/readyz", "/metrics"):
            assert await asked(http, each) == (200, "")


@BOTH_ROLES
async def test_no_way_to_write_a_path_opens_a_page_that_needs_a_token(
    door: Door, page: str, access: AdminAccess
) -> None:
    name = page.removeprefix("/")
    tricks = (
        f"/page/..{page}",
        f"/page/%2e%2e/{name}",
        f"//{name}",
        f"/{name}/",
        f"/%73{name[1:]}",
        f"/metrics/..{page}",
        f"/metrics;{page}",
        f"{page}%00",
        f"http://localhost{page}",
    )
    async with door(access) as port:
        for path in tricks:
            status = await raw_status(port, f"GET {path} HTTP/1.1")
            assert status in {400, 401, 404}, path
        assert await raw_status(port, f"HEAD {page} HTTP/1.1") == 401
        assert await raw_status(port, f"DELETE {page} HTTP/1.1") == 401
        assert await raw_status(port, "GET /no-such-page HTTP/1.1") == 401, "not even which pages there are"


async def raw_status(port: int, line: str) -> int:
    """Send a request line as it is; return the status."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(f"{line}\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
        status = int((await reader.readline()).split()[1])
        writer.close()
    return status


@BOTH_ROLES
async def test_a_token_is_replaced_without_a_restart_and_both_count_meanwhile(
    door: Door, page: str, access: AdminAccess
) -> None:
    assert access.token_file is not None
    async with door(access) as port, client(port) as http:
        write(access.token_file, f"{NEXT}\n{TOKEN}\n")
        assert [await asked(http, page, headers=bearer(each)) for each in (TOKEN, NEXT)] == [(200, ""), (200, "")]
        write(access.token_file, NEXT)
        assert await asked(http, page, headers=bearer(TOKEN)) == (401, "token-wrong")
        assert await asked(http, page, headers=bearer(NEXT)) == (200, "")


@pytest.mark.parametrize("content", [None, "", "too-short", "sixteen bytes and a blank", "a" * 15 + "\n" + TOKEN])
async def test_a_token_file_that_cannot_be_used_lets_nobody_in_until_it_can(
    content: str | None, access: AdminAccess, caplog: pytest.LogCaptureFixture
) -> None:
    assert access.token_file is not None
    if content is None:
        access.token_file.unlink()
    else:
        write(access.token_file, content)
    async with picker_door(access) as port, client(port) as http:
        assert await asked(http, "/state", headers=bearer(TOKEN)) == (503, "token-file-unusable")
        assert await asked(http, "/state", headers=bearer("too-short")) == (503, "token-file-unusable")
        assert await asked(http, "/readyz") == (200, "")
        assert len([record for record in caplog.records if "let nobody in" in record.message]) == 1
        assert not content or content not in caplog.text
        write(access.token_file, TOKEN)
        assert await asked(http, "/state", headers=bearer(TOKEN)) == (200, "")


def test_a_pipe_is_refused_as_token_file_instead_of_waiting_for_who_writes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingError, match="pipe is no file with a token"):
        AdminLogin(token_file=tmp_path / "pipe").headers()


async def test_who_guesses_is_locked_out_for_a_while_even_with_the_right_token(access: AdminAccess) -> None:
    async with picker_door(access) as port, client(port) as http:
        for i in range(TRIES_AT_ONCE):
            assert await asked(http, "/state", headers=bearer(f"guess number {i:05}")) == (401, "token-wrong")
        async with http.get("/state", headers=bearer(TOKEN)) as answer:
            assert answer.status == 429
            assert 0 < int(answer.headers["Retry-After"]) <= 6
        assert await asked(http, "/metrics") == (200, "")
        assert await asked(http, "/state") == (401, "token-missing")


async def test_an_old_token_in_some_script_locks_nobody_out(access: AdminAccess) -> None:
    async with picker_door(access) as port, client(port) as http:
        for _ in range(TRIES_AT_ONCE * 3):
            assert await asked(http, "/state", headers=bearer(NEXT)) == (401, "token-wrong")
        assert await asked(http, "/state", headers=bearer(TOKEN)) == (200, "")


async def test_wrong_tokens_are_in_the_log_by_address_and_never_by_what_they_are(
    access: AdminAccess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with picker_door(access) as port, client(port) as http:
        await asked(http, "/state", headers=bearer("nearly-the-right-one"))
        await asked(http, "/state", headers=bearer(TOKEN))
    warned = [record for record in caplog.records if "wrong token" in record.message]
    assert [getattr(record, "address", None) for record in warned] == [HOST]
    everything = " ".join(str(vars(record)) for record in caplog.records if record.name != "asyncio")
    assert "nearly-the-right-one" not in everything
    assert TOKEN not in everything


@BOTH_ROLES
async def test_pages_of_other_sites_get_nothing_in_a_browser(door: Door, page: str) -> None:
    async with door() as port, client(port) as http:
        evil = {"Origin": "https://evil.example.com"}
        assert await asked(http, page, headers=evil) == (403, "cross-site")
        assert await asked(http, page, headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}) == (
            403,
            "cross-site",
        )
        async with http.get(page) as answer:
            headers = {name.lower() for name in answer.headers}
        assert not {name for name in headers if name.startswith("access-control-")}
        assert "set-cookie" not in headers
        assert {
            "cache-control",
            "content-security-policy",
            "cross-origin-resource-policy",
            "referrer-policy",
            "x-content-type-options",
        } <= headers


async def test_another_site_cannot_have_a_prompt_explained() -> None:
    pages = Pages()
    async with picker_door(pages=pages) as port, client(port) as http:
        form = {"Origin": "https://evil.example.com", "Content-Type": "text/plain"}
        assert await asked(http, "/v1/explain", method="POST", data=b"{}", headers=form) == (403, "cross-site")
        assert await asked(http, "/v1/explain", method="OPTIONS") == (405, "method-not-allowed")
        assert pages.explained == []
        own = {"Origin": f"http://{HOST}:{port}", "Sec-Fetch-Site": "same-origin"}
        assert await asked(http, "/v1/explain", method="POST", data=b"{}", headers=own) == (200, "")


async def test_an_explained_request_does_not_carry_the_admin_token(access: AdminAccess) -> None:
    pages = Pages()
    async with picker_door(access, pages=pages) as port, client(port) as http:
        path = "/v1/explain?host=llm.example.com"
        assert await asked(http, path, method="POST", data=b"{}", headers=bearer(TOKEN)) == (200, "")
    async with picker_door(pages=pages) as port, client(port) as http:
        client_token = bearer("a client's own")
        assert await asked(http, "/v1/explain", method="POST", data=b"{}", headers=client_token) == (200, "")
    [with_token, without] = pages.explained
    assert "authorization" not in with_token.headers
    assert with_token.headers["host"] == "llm.example.com"
    assert without.headers["authorization"] == "Bearer a client's own"


async def test_errors_of_pages_are_json_and_say_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    async with picker_door() as port, client(port) as http:
        assert await asked(http, "/nowhere") == (404, "not-found")
        assert await asked(http, "/state", method="POST") == (405, "method-not-allowed")
        async with http.get("/pools") as answer:
            assert (answer.status, (await answer.json())["reason"]) == (500, "internal-error")
            assert "defect" not in await answer.text()
        large = await asked(http, "/v1/explain", method="POST", data=b"x" * 2000)
        assert large[0] == 413
    assert "an admin page failed" in caplog.text


async def test_a_client_reads_its_token_file_at_every_request(access: AdminAccess, tmp_path: Path) -> None:
    assert access.token_file is not None
    login = AdminLogin(token_file=tmp_path / "mine")
    write(tmp_path / "mine", f"{TOKEN}\n")
    async with picker_door(access) as port, client(port) as http:
        assert await asked(http, "/state", headers=login.headers(), ssl=login.tls()) == (200, "")
        write(access.token_file, NEXT)
        assert await asked(http, "/state", headers=login.headers(), ssl=login.tls()) == (401, "token-wrong")
        write(tmp_path / "mine", NEXT)
        assert await asked(http, "/state", headers=login.headers(), ssl=login.tls()) == (200, "")


@BOTH_ROLES
async def test_a_packed_body_is_never_unpacked(door: Door, page: str, access: AdminAccess) -> None:
    packed = gzip.compress(bytes(100 << 20))
    for path in (page, "/healthz"):
        async with door(access) as port, client(port) as http:
            before = time.process_time()
            answer = await asked(http, path, method="POST", data=packed, headers={"Content-Encoding": "gzip"})
            assert answer == (401, "token-missing")
            assert await asked(http, "/healthz") == (200, "")
            assert time.process_time() - before < 0.1, "unpacked it takes 0.2 s, in which nobody else is answered"


async def test_a_packed_prompt_is_refused_with_what_to_do() -> None:
    pages = Pages()
    async with picker_door(pages=pages) as port, client(port) as http:
        headers = {"Content-Encoding": "gzip"}
        refused = await asked(http, "/v1/explain", method="POST", data=gzip.compress(b"{}"), headers=headers)
    assert refused == (415, "unsupported-media-type")
    assert pages.explained == []


@BOTH_ROLES
async def test_what_is_no_http_is_answered_and_fills_no_log(
    door: Door, page: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with door() as port:
        assert await raw_status(port, f"GET {page} HTTP/1.1\r\nno colon here") == 400
    assert "no colon here" not in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

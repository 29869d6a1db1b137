"""What the page's files are and are not: our own, alone, and served with headers that keep them so."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from extproc.pages.admin_http import PageFiles

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "extproc" / "pages" / "page").iterdir())
Client = TestClient[web.Request, web.Application]


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    app = web.Application()
    app.add_routes(PageFiles().routes())
    async with TestClient(TestServer(app)) as made:
        yield made


async def test_every_file_is_served_with_its_type_and_the_strict_headers(client: Client) -> None:
    for file in FILES:
        async with client.get(f"/page/{file.name}") as answer:
            assert (answer.status, await answer.read()) == (200, file.read_bytes())
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
            assert answer.content_type == kind[file.suffix[1:]]
            assert "Set-Cookie" not in answer.headers
    async with client.get("/") as answer:
        assert "<title>kvmesh</title>" in await answer.text()


async def test_what_a_browser_has_already_is_not_sent_again(client: Client) -> None:
    async with client.get("/page/main.js") as answer:
        etag, cached = answer.headers["ETag"], answer.headers["Cache-Control"]
    async with client.get("/page/main.js", headers={"If-None-Match": etag}) as answer:
        assert (answer.status, await answer.read(), cached) == (304, b"", "no-cache")
    async with client.get("/page/main.js", headers={"If-None-Match": '"old"'}) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("name", ["..%2Fcli.py", "..%2f..%2fetc%2fpasswd", "nothing.js", "index.html%00"])
async def test_nothing_else_is_served(client: Client, name: str) -> None:
    async with client.get(f"/page/{name}") as answer:
        assert answer.status in (400, 404)


async def test_a_probe_may_ask_without_the_content(client: Client) -> None:
    async with client.head("/") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    with pytest.raises(aiohttp.ClientResponseError):
        async with client.post("/", raise_for_status=True):
            pass


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_needs_another_server_or_makes_markup_of_text(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://|//[a-z0-9.-]+\.[a-z]{2,}/|@import|url\(", text) == []
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(\"on"
    assert re.findall(forbidden, text) == []
    if file.suffix == ".html":
        assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son[a-z]+=|javascript:", text) == []


def test_every_module_is_fetched_at_once() -> None:
    """What is imported only by another module would cost one more round trip to a picker that is far away."""
    html = (ROOT / "extproc" / "pages" / "page" / "index.html").read_text(encoding="utf-8")
    linked = set(re.findall(r'(?:src|href)="/page/([^"]+)"', html))
    assert linked == {file.name for file in FILES} - {"index.html"}


def test_findings_are_explained_in_the_words_of_the_docs() -> None:
    table = (ROOT / "docs" / "reference" / "findings.md").read_text(encoding="utf-8")
    documented = {
        name: [means.replace("`", ""), fix.replace("`", "")]
        for name, means, fix in re.findall(r"^\| \[`([a-z-]+)`\]\([^)]*\) \| (.*?) \| (.*?) \|$", table, re.MULTILINE)
    }
    script = (ROOT / "extproc" / "pages" / "page" / "findings.js").read_text(encoding="utf-8")
    shown = {
        name: [means, fix] for name, means, fix in re.findall(r'^  "([a-z-]+)": \["(.*?)", "(.*?)"\],$', script, re.M)
    }
    assert shown == documented != {}

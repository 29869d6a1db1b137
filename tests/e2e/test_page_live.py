"""The page on a real mesh: `kvmesh up` with real requests, seen in a real Chromium."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.browser.chromium import chromium, feed_is, opened
from tests.e2e.stack import Stack, running_stack, simulated_pods

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIBRARIAN = "You are the librarian of a small town. You answer in two sentences and name the shelf. " * 4
SLOW_MILLISECONDS = 20_000  # prefixes come every 5 seconds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A mesh of three pods that has answered some chats; the browser first, so that nothing is started without one."""
    async with running_stack(tmp_path_factory.mktemp("page")) as stack:
        for i in range(12):
            body = {"model": "tiny", "max_tokens": 2, "messages": chat(f"Question {i % 3}")}
            answer = await stack.send("POST", "/v1/chat/completions", json=body)
            assert answer.status == 200
        yield stack


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": LIBRARIAN}, {"role": "user", "content": question}]


async def go(page: Page, view: str) -> None:
    await page.click(f"nav a[href='#/{view}']")
    await expect(page.locator(f"#view-{view}")).to_be_visible()


async def test_every_view_shows_the_running_mesh(browser: Browser, busy: Stack) -> None:
    async with opened(browser, busy.ready["admin"]) as page:
        await expect(page.locator("button.pod")).to_have_count(3)
        await expect(page.locator("#view-pods .lead")).to_contain_text("3 pods, all ready")
        await expect(page.locator("#view-pods .decision").first).to_contain_text("of")
        await go(page, "prefixes")
        rows = page.locator("#view-prefixes tbody tr")
        await expect(rows.first).to_contain_text("of 3 pods", timeout=SLOW_MILLISECONDS)
        await go(page, "decisions")
        await page.click("#view-decisions .decision >> nth=0")
        await expect(page.locator("#sheet .candidates tbody tr.winner").first).to_be_visible()
        await page.keyboard.press("Escape")
        await go(page, "classes")
        await expect(page.locator("#view-classes tbody tr").first).to_contain_text("critical")
        await go(page, "latency")
        await expect(page.locator("#view-latency")).to_contain_text("as the pods’ own histograms count them")
        await expect(page.locator("#foot")).to_contain_text("kvmesh")
        await go(page, "index")
        await expect(page.locator("#view-index .lead")).to_contain_text("3 of 3 event streams live")


async def test_the_latency_of_streams_is_shown_by_class_and_outlives_a_reload(browser: Browser, tmp_path: Path) -> None:
    async with (
        running_stack(tmp_path, settings="sample_share: 1.0\n", pods=2) as stack,
        opened(browser, f"{stack.ready['admin']}/#/latency") as page,
    ):
        for i in range(6):
            body = {"model": "tiny", "max_tokens": 8, "stream": True, "messages": chat(f"Question {i}")}
            await stack.send("POST", "/v1/chat/completions", json=body)
        rows = page.locator("#view-latency .latency-row")
        first = rows.filter(has_text="standard").locator(".spread")
        for i in range(2):  # TTFT and inter-token time
            await expect(first.nth(i)).to_contain_text("6 streams in 15 minutes", timeout=SLOW_MILLISECONDS)
        # a pod's page is read every five seconds
        pods = rows.last.locator(".spread").first
        await expect(pods).to_contain_text("requests in 15 minutes", timeout=SLOW_MILLISECONDS)
        await page.reload()
        await expect(first.first).to_contain_text("6 streams in 15 minutes")


async def test_a_pod_that_is_killed_says_since_when_and_why(browser: Browser, tmp_path: Path) -> None:
    async with (
        simulated_pods(2) as pods,
        running_stack(tmp_path, endpoints=tuple(pods)) as stack,
        opened(browser, stack.ready["admin"]) as page,
    ):
        await expect(page.locator("button.pod")).to_have_count(2)
        pods[next(iter(pods))].kill()
        await page.click("button.pod.ill")
        told = page.locator("#sheet .stopped")
        await expect(told).to_contain_text("unreachable since")
        await expect(told).to_contain_text("Nothing listens there. Last error: no load from /metrics")
        await expect(told).to_contain_text("out of rotation")


async def test_a_request_appears_while_the_page_is_open_with_its_end(browser: Browser, busy: Stack) -> None:
    async with opened(browser, f"{busy.ready['admin']}/#/decisions") as page:
        before = await page.locator("#view-decisions .decision").count()
        answer = await busy.complete("Why is the sea salty?", model="tiny")
        assert answer.status == 200
        await expect(page.locator("#view-decisions .decision")).to_have_count(before + 1)
        await expect(page.locator("#view-decisions .decision").first).to_contain_text("200 ·")


async def test_a_tried_prompt_is_explained_and_not_sent(browser: Browser, busy: Stack) -> None:
    async with opened(browser, f"{busy.ready['admin']}/#/try") as page:
        await expect(page.locator("#try-model")).to_have_value("tiny")
        before = await busy.state()
        await page.fill("#try-system", LIBRARIAN)
        await page.fill("#try-prompt", "Question 1")
        await page.click("text=Explain")
        await expect(page.locator(".result .whither")).to_contain_text("127.0.0.1:")
        await expect(page.locator(".result .why")).to_contain_text("It would be sent at once")
        await expect(page.locator(".result .why")).to_contain_text("prompt tokens are expected in its cache")
        after = await busy.state()
        assert [pod["picks"] for pod in before["endpoints"]] == [pod["picks"] for pod in after["endpoints"]]


async def test_no_prompt_reaches_the_page(browser: Browser, busy: Stack) -> None:
    async with opened(browser, busy.ready["admin"]) as page:
        for view in ("pods", "prefixes", "decisions", "classes", "index"):
            await go(page, view)
            assert "librarian" not in await page.content()


async def test_a_picker_with_a_token_shows_nothing_without_it(browser: Browser, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-the-token\n", encoding="utf-8")
    settings = json.dumps({"admin_token_file": str(token)})  # JSON is YAML
    async with running_stack(tmp_path, settings=settings, pods=1) as stack:
        url = stack.ready["admin"]
        async with opened(browser, url, live=False, expected=["401"]) as page:
            await feed_is(page, "locked")
            assert stack.ready["endpoints"][0] not in await page.content()
            await page.fill("#token", "0123456789abcdef-the-token")
            await page.keyboard.press("Enter")
            await feed_is(page, "live")
            await expect(page.locator("button.pod")).to_have_count(1)

"""Deep links: each thing that can be opened has an address, which survives a reload and the browser's back."""

import asyncio
import time
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from tests.browser import feed_data
from tests.browser.chromium import chromium, grave_findings, opened
from tests.browser.fake_picker import FakePicker, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
POD = feed_data.address(3)
PODS = f"#/pods/{quote(POD, safe='')}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


def picker() -> FakePicker:
    return FakePicker(feed_data.snapshot(6, now=time.time()))


async def shows(page: Page, title: str) -> None:
    await expect(page.locator("#sheet")).to_be_visible()
    await expect(page.locator("#sheet-title")).to_contain_text(title)


async def is_closed(page: Page, address: str) -> None:
    await expect(page.locator("#sheet")).to_be_hidden()
    await page.wait_for_function("(hash) => location.hash === hash", arg=address)


async def test_a_pod_has_an_address_and_the_browsers_back_closes_it(browser: Browser) -> None:
    async with running(picker()) as fake, opened(browser, f"{fake.url}/#/pods") as page:
        await page.click("button.pod >> nth=3")
        await shows(page, POD)
        assert page.url.endswith(PODS)
        assert await page.title() == f"{POD} · kvmesh"
        await page.reload()
        await shows(page, POD)
        await page.go_back()
        await is_closed(page, "#/pods")
        assert await page.title() == "Pods · kvmesh"
        await page.go_forward()
        await shows(page, POD)
        await page.keyboard.press("Escape")
        await is_closed(page, "#/pods")


@pytest.mark.parametrize(
    ("view", "opener", "title"),
    [
        ("decisions", "#view-decisions .decision >> nth=0", "Decision at"),
        ("prefixes", "#view-prefixes .prefix-name >> nth=0", "A prefix"),
        ("classes", "#view-classes .strong-name >> nth=0", "Class critical"),
    ],
)
async def test_what_is_opened_is_there_again_after_a_reload(
    browser: Browser, view: str, opener: str, title: str
) -> None:
    async with running(picker()) as fake, opened(browser, f"{fake.url}/#/{view}") as page:
        await page.click(opener)
        await shows(page, title)
        address = page.url
        assert f"#/{view}/" in address
        assert await grave_findings(page) == []
        said = await page.inner_text("#sheet-body")
        async with opened(browser, address) as another:  # somebody who was sent the link
            await shows(another, title)
            assert (await another.inner_text("#sheet-body"))[:80] == said[:80]
            await another.click("#sheet-close")
            await is_closed(another, f"#/{view}")


async def test_a_decision_from_another_view_leaves_that_view_below_and_the_focus_where_it_was(browser: Browser) -> None:
    async with running(picker()) as fake, opened(browser, fake.url) as page:
        await page.focus("#view-pods .decision >> nth=2")
        await page.keyboard.press("Enter")
        await shows(page, "Decision at")
        assert "#/decisions/" in page.url
        await expect(page.locator("#view-pods")).to_be_visible()
        await page.keyboard.press("Escape")
        await is_closed(page, "")
        await expect(page.locator("#view-pods .decision").nth(2)).to_be_focused()


async def test_what_was_opened_from_what_is_open_is_left_at_once_and_one_by_one_with_back(browser: Browser) -> None:
    async with running(picker()) as fake, opened(browser, f"{fake.url}/#/decisions") as page:
        endpoint = fake.snapshot["decisions"][0]["endpoint"]
        await page.goto(f"{fake.url}/#/pods")
        await page.click(f"button.pod[title='{endpoint}']")
        await page.click("#sheet-body ul .linkish >> nth=0")
        await shows(page, "Decision at")
        await page.go_back()
        await shows(page, endpoint)
        await page.go_forward()
        await shows(page, "Decision at")
        await page.keyboard.press("Escape")
        await is_closed(page, "#/pods")


async def test_a_decision_that_the_page_does_not_have_is_asked_for(browser: Browser) -> None:
    fake = picker()
    fake.decisions = [feed_data.decision(99, 6) | {"id": "old-one"}]
    async with running(fake), opened(browser, f"{fake.url}/#/decisions/old-one") as page:
        await shows(page, "Decision at")
        await expect(page.locator("#sheet .whither")).to_have_text(fake.decisions[0]["endpoint"])
        assert fake.decisions_asked == [{"decision_id": "old-one", "limit": "1"}]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("decisions/none-such", "does not know the decision"),
        ("pods/10.9.9.9%3A8000", "no longer in the pool"),
        ("prefixes/none-such", "not among the most used prefixes"),
        ("classes/none-such", "no such class"),
        ("pods/%E0%A4", "no longer in the pool"),
    ],
)
async def test_what_is_not_there_is_said(browser: Browser, place: str, words: str) -> None:
    async with running(picker()) as fake, opened(browser, f"{fake.url}/#/{place}") as page:
        await expect(page.locator("#sheet-body")).to_contain_text(words)
        await page.keyboard.press("Escape")
        await is_closed(page, f"#/{place.split('/', maxsplit=1)[0]}")


async def test_a_class_has_its_latency_and_its_decisions(browser: Browser) -> None:
    async with running(picker()) as fake, opened(browser, f"{fake.url}/#/classes/standard") as page:
        await shows(page, "Class standard")
        await expect(page.locator("#sheet-body .facts")).to_contain_text("2.0 s")
        await expect(page.locator("#sheet-body .latency-row")).to_have_count(1)
        await expect(page.locator("#sheet-body .spread").first).to_contain_text("p99 738 ms")
        await page.click("#sheet-body ul .linkish >> nth=0")
        await shows(page, "Decision at")


async def test_candidates_that_come_late_do_not_cover_what_was_opened_meanwhile(browser: Browser) -> None:
    fake = FakePicker(feed_data.snapshot(30, now=time.time()))
    fake.decisions = fake.snapshot["decisions"]
    may_answer = asyncio.Event()
    has_asked = asyncio.Event()

    async def late(route: Route) -> None:
        has_asked.set()
        await may_answer.wait()
        await route.continue_()

    async with running(fake), opened(browser, f"{fake.url}/#/decisions") as page:
        await page.route("**/v1/decisions?*", late)
        await page.click("#view-decisions .decision >> nth=0")
        await page.click("#sheet-body button:text('Show all')")
        await has_asked.wait()
        await page.keyboard.press("Escape")
        await is_closed(page, "#/decisions")
        await page.goto(f"{fake.url}/#/prefixes/{fake.snapshot['prefixes']['nodes'][0]['id']}")
        await shows(page, "A prefix")
        async with page.expect_response("**/v1/decisions?*") as answer:
            may_answer.set()
        await (await answer.value).finished()
        await page.evaluate("new Promise((done) => setTimeout(done))")  # what has come is taken in this turn
        assert await page.locator("#sheet-body .explanation").count() == 0


async def test_a_decision_is_found_by_the_id_that_its_answer_told(browser: Browser) -> None:
    async with running(picker()) as fake, opened(browser, f"{fake.url}/#/decisions") as page:
        await page.fill("#search", fake.snapshot["decisions"][3]["id"].upper())
        await expect(page.locator("#view-decisions .decision")).to_have_count(1)
        await page.click("#view-decisions .decision")
        assert page.url.endswith(f"#/decisions/{fake.snapshot['decisions'][3]['id']}")

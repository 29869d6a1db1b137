"""The last 15 minutes, which the picker keeps, stopped pods, and the foot of the page."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from tests.browser import feed_data
from tests.browser.chromium import chromium, opened
from tests.browser.fake_picker import FakePicker, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


def picker(**parts: Any) -> FakePicker:
    return FakePicker(feed_data.snapshot(6, now=time.time(), **parts))


def stopped(now: float, pool: str = "", **changes: Any) -> FakePicker:
    """A pool whose third pod is as `changes` say since two minutes."""
    common = {"since": now - 120.0, "running": None, "waiting": None, "kv_usage": None}
    return picker(pods=feed_data.pods(6, now=now, blocks=9000, changes={2: common | changes}), pool=pool)


async def test_every_series_has_its_percentiles_its_number_and_the_classs_slo(browser: Browser) -> None:
    async with running(picker()) as fake, opened(browser, f"{fake.url}/#/latency") as page:
        rows = page.locator("#view-latency .latency-row")
        await expect(rows).to_have_count(4)
        await expect(rows.locator("h3")).to_have_text(
            ["critical · qwen3-32b", "standard · qwen3-32b", "sheddable · qwen3-32b", "qwen3-32b"]
        )
        whole = fake.snapshot["history"]["latencies"][2]["whole"]
        said = rows.nth(0).locator(".spread").first
        await expect(said).to_contain_text(f"p50 99 ms, p95 216 ms, p99 369 ms; {whole['observed']} streams")
        await expect(said).to_contain_text("SLO 500 ms")
        await expect(rows.nth(3).locator(".spread").first).not_to_contain_text("SLO")
        drawn = await rows.nth(1).locator(".timeline path.p99").first.get_attribute("d")
        assert drawn
        assert drawn.startswith("M")
        assert await rows.locator(".timeline").count() == 8


async def test_who_measured_what_and_of_what_share_is_said(browser: Browser) -> None:
    async with running(picker()) as fake, opened(browser, f"{fake.url}/#/latency") as page:
        view = page.locator("#view-latency")
        await expect(view).to_contain_text("kept by picker picker-7d9f-a1")
        await expect(view).to_contain_text("1 other picker keeps its own")
        await expect(view).to_contain_text("2 % of all (sampleShare)")
        await expect(view).to_contain_text("as the pods’ own histograms count them")
        fake.push("history", feed_data.history(now=time.time(), busy=False) | {"sample_share": 0.0})
        await expect(view).to_contain_text("No answer is read: observability.sampleShare is 0")
        await expect(view.locator(".latency-row")).to_have_count(0)


async def test_one_slice_is_told_where_the_pointer_is_and_all_of_them_in_a_table(browser: Browser) -> None:
    async with running(picker()) as fake, opened(browser, f"{fake.url}/#/latency") as page:
        chart = page.locator("#view-latency .latency-row").nth(3).locator(".chart").first
        slices = fake.snapshot["history"]["latencies"][6]["slices"]
        box = await chart.locator(".timeline svg").bounding_box()
        assert box is not None
        await chart.locator(".timeline svg").hover(position={"x": box["width"] * 40.5 / 60, "y": 20})
        await expect(chart.locator(".spread")).to_contain_text(f"p50 {round(slices['p50_ms'][40])} ms")
        await chart.locator("summary").click()
        measured = sum(1 for each in slices["observed"] if each)
        await expect(chart.locator("tbody tr")).to_have_count(measured)
        await page.mouse.move(0, 0)
        await expect(chart.locator(".spread")).to_contain_text("in 15 minutes")


async def test_a_reload_loses_nothing_and_what_comes_is_taken(browser: Browser) -> None:
    async with running(picker()) as fake, opened(browser, fake.url) as page:
        hits, load = page.locator(".figure").nth(0), page.locator(".figure .spark.load .line")
        await expect(hits).to_contain_text("expected, last 15 min")
        shown, drawn = await hits.locator(".value").inner_text(), await load.get_attribute("d")
        assert drawn
        assert drawn.count("L") > 100  # slices of five seconds
        await page.reload()
        await expect(load).to_have_attribute("d", drawn)
        await expect(hits.locator(".value")).to_have_text(shown)
        more = feed_data.history(now=time.time())
        more["load"] |= {"cached_tokens": more["load"]["prompt_tokens"]}
        fake.push("history", more)
        await expect(hits.locator(".value")).to_have_text("100 %")
        await expect(page.locator(".figure").nth(3)).to_contain_text("p50 92 ms, at the pods")


async def test_the_first_minutes_of_a_picker_are_as_wide_as_any(browser: Browser) -> None:
    now = time.time()
    young = feed_data.history(now=now) | {"since": now - 120.0}
    async with running(picker(history=young)) as fake, opened(browser, fake.url) as page:
        drawn = await page.locator(".figure .spark.load .line").get_attribute("d")
        assert drawn
        assert (drawn.startswith("M0.0 "), drawn.count("L") < 30) == (True, True)
        await page.click("nav a[href='#/latency']")
        chart = page.locator("#view-latency .latency-row").nth(3).locator(".chart").first
        line = await chart.locator("path.p50").get_attribute("d")
        assert line
        assert line.count("L") < 10
        slices = young["latencies"][6]["slices"]
        box = await chart.locator(".timeline svg").bounding_box()
        assert box is not None
        await chart.locator(".timeline svg").hover(position={"x": box["width"] - 2, "y": 20})
        await expect(chart.locator(".spread")).to_contain_text(f"p50 {round(slices['p50_ms'][-1])} ms")


async def test_a_picker_without_a_history_shows_none(browser: Browser) -> None:
    fake = picker()
    del fake.snapshot["history"]
    async with running(fake), opened(browser, fake.url) as page:
        await expect(page.locator(".figure").nth(0)).to_contain_text("no prompts lately")
        await expect(page.locator(".figure").nth(3)).to_contain_text("no tokens lately")
        await page.click("nav a[href='#/latency']")
        await expect(page.locator("#view-latency .latency-row")).to_have_count(0)


async def test_a_stopped_pod_says_since_when_why_and_what_follows(browser: Browser) -> None:
    problem = "no load from /metrics: Connect call failed"
    changes: dict[str, Any] = {"state": "unreachable", "problem": problem, "asked_every_seconds": 0.2}
    async with running(stopped(time.time(), **changes)) as fake, opened(browser, fake.url) as page:
        line = page.locator(".attention li", has_text="unreachable since")
        await expect(line).to_contain_text(problem)
        await line.locator("a").click()
        told = page.locator("#sheet .stopped")
        await expect(told).to_contain_text("(2 min)")
        await expect(told).to_contain_text(f"Nothing listens there. Last error: {problem}.")
        await expect(told).to_contain_text("out of rotation")
        await expect(told).to_contain_text("asked again every 0.2 s")
        await expect(told).to_contain_text("for as long as --endpoints names it")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "unknown", "problem": "it hangs", "asked_every_seconds": 1.0}, "a few requests at a time"),
        ({"state": "not-ready"}, "when its platform says that it is ready"),
        ({"state": "terminating"}, "when it leaves the pool and its last request has ended"),
        ({"avoided": "4 of 4 requests failed", "trial_at": time.time() + 900}, "One request is tried there at"),
        ({"avoided": "cordoned"}, "the policy keeps new requests away"),
        ({"avoided": "90 ms a token, the others 20 ms"}, "near that of the others"),
    ],
)
async def test_each_way_to_be_out_of_rotation_has_its_words(
    browser: Browser, changes: dict[str, Any], words: str
) -> None:
    async with running(stopped(time.time(), pool="shop/chat", **changes)) as fake, opened(browser, fake.url) as page:
        await page.click("button.pod.ill")
        await expect(page.locator("#sheet .stopped")).to_contain_text(words)


async def test_the_foot_names_version_and_picker_and_leads_to_the_docs(browser: Browser) -> None:
    async with running(picker()) as fake, opened(browser, fake.url) as page:
        foot = page.locator("#foot")
        await expect(foot).to_contain_text("kvmesh 0.1.0")
        await expect(foot).to_contain_text("Picker picker-7d9f-a1")
        link = foot.get_by_role("link", name="This page explained")
        await expect(link).to_have_attribute("href", "https://docs.example/kvmesh/guides/page.md")
        fake.snapshot["docs"] = "javascript:alert(1)"
        await page.reload()
        await expect(foot).to_contain_text("Picker")
        await expect(foot.get_by_role("link")).to_have_count(0)

"""A real headless Chromium for tests of the page, and one opened page that must stay without errors."""

import importlib.resources
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright

# nothing is asked of the network but what a test opens; in containers tests run as root, where there is no sandbox
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MILLISECONDS = 10_000
GRAVE = ("serious", "critical")
AXE = {"resultTypes": ["violations"], "preload": False}  # nothing but what is wrong: faster


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start it; skip where it is not installed, but fail where programs are demanded."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        words = "needs Chromium (Debian: chromium)"
        if os.environ.get("KVMESH_REQUIRE_PROGRAMS") == "1":
            pytest.fail(words)
        pytest.skip(words)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def opened(
    browser: Browser,
    url: str,
    *,
    width: int = 1440,
    height: int = 900,
    theme: str = "light",
    live: bool = True,
    expected: Sequence[str] = (),
) -> AsyncIterator[Page]:
    """Open `url`; fail for any error of the page or its console, but for those with one of the `expected` words."""
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT_MILLISECONDS)
    said: list[str] = []
    try:
        page = await context.new_page()
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(f"{error}\n{error.stack}"))
        await page.goto(url)
        if live:
            await feed_is(page, "live")
        yield page
        assert [line for line in said if not any(word in line for word in expected)] == []
    finally:
        await context.close()


async def feed_is(page: Page, state: str) -> None:
    """Wait for the state of the page's connection."""
    await page.wait_for_selector(f"html[data-feed={state}]", state="attached")


async def grave_findings(page: Page) -> list[Any]:
    """Return what axe finds serious or critical: rule and where."""
    if not await page.evaluate("'axe' in window"):
        script = importlib.resources.files("axe_playwright_python") / "axe.min.js"
        await page.evaluate(script.read_text(encoding="utf-8"))
    found = await page.evaluate("(options) => axe.run(document, options)", AXE)
    return [
        (rule["id"], rule["help"], [node["html"][:160] for node in rule["nodes"][:4]])
        for rule in found["violations"]
        if rule["impact"] in GRAVE
    ]


async def overflow(page: Page) -> int:
    """Return by how many pixels the page is wider than its window."""
    wide = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return int(wide)

"""A real headless Chromium for tests of the page, and one opened page that must stay without errors."""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

from tests.browser.axe.script import axe_script
from tests.required_programs import lacks

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
# rules that axe does not run by itself; those of them that find nothing grave say nothing here
MORE_RULES = ("label-content-name-mismatch", "target-size", "hidden-content", "focus-order-semantics", "p-as-heading")
# nothing but what is wrong: faster
AXE = {"resultTypes": ["violations"], "preload": False, "rules": {name: {"enabled": True} for name in MORE_RULES}}


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start it; skip where it is not installed, but fail where programs are demanded."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        lacks("needs Chromium (Debian: chromium)")
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
        await page.evaluate(axe_script())
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


# of each tile: words that leave it, that are cut off, or that lie on other words
SPILLED = """(selector) => {
  const seen = (node, tile) => {
    for (let at = node; at !== tile; at = at.parentElement) if (getComputedStyle(at).clipPath !== "none") return false;
    return node.checkVisibility({ checkVisibilityCSS: true });
  };
  const inside = (line, box) =>
    line.left >= box.left && line.right <= box.right + 0.5 && line.top >= box.top && line.bottom <= box.bottom + 0.5;
  const meet = (a, b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  const found = [];
  for (const tile of document.querySelectorAll(selector)) {
    const box = tile.getBoundingClientRect();
    const lines = [];
    const texts = document.createTreeWalker(tile, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = texts.currentNode;
      if (!text.data.trim() || !seen(text.parentElement, tile)) continue;
      const range = document.createRange();
      range.selectNodeContents(text);
      for (const line of range.getClientRects()) {
        if (!inside(line, box)) found.push(`leaves its tile: ${text.data}`);
        lines.push([line, text]);
      }
      for (let node = text.parentElement; node !== tile; node = node.parentElement)
        if (getComputedStyle(node).overflow !== "visible" && node.scrollWidth > node.clientWidth)
          found.push(`is cut off: ${text.data}`);
    }
    for (const [i, [a, one]] of lines.entries())
      for (const [b, other] of lines.slice(i + 1))
        if (one !== other && meet(a, b)) found.push(`lies on other words: ${one.data} | ${other.data}`);
  }
  return found;
}"""


async def spilled(page: Page, selector: str) -> list[str]:
    """Return the words in these tiles that are not whole and apart from each other within their tile."""
    found: list[str] = await page.evaluate(SPILLED, selector)
    return found

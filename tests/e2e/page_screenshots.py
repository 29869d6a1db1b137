"""Makes the pictures of docs/guides/page.md: `python -m tests.e2e.page_screenshots FOLDER` starts a mesh."""

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
from playwright.async_api import Browser, Page, expect

from tests.browser.chromium import chromium, feed_is
from tests.e2e.stack import Stack, running_stack, simulated_pods

ROLES = (
    "You are the librarian of a small town. You answer in two sentences at most and name the shelf. ",
    "You are a careful SQL assistant. Answer with one query, and use only the tables that are named below. ",
    "Translate the user's text to French. Keep names as they are, and the line breaks where they were. ",
    "Summarise the following support ticket in three bullets for an engineer on call. ",
)
PODS = 12
CLIENTS = 20
SECONDS_BEFORE = 100.0  # for the lines to have a past
# caches that fill while one looks
SMALL = ("--kv-blocks", "100", "--max-model-len", "1500", "--max-num-seqs", "8")
# a machine that is busy with the browser is no finding; half of the streams are measured, so that few requests suffice
SETTINGS = "index_timeout_ms: 500\nsample_share: 0.5\npolicy: {priorities: {trustObjective: true}}\n"
VIEWS = ("pods", "prefixes", "decisions", "classes", "latency", "index")
DARK_VIEWS = ("pods", "prefixes", "latency")


async def client(stack: Stack, seed: int) -> None:
    dice = random.Random(seed)
    while True:
        role = min(int(dice.expovariate(0.8)), len(ROLES) - 1)
        messages = [{"role": "system", "content": ROLES[role] * 5}]
        for turn in range(dice.choice([1, 1, 2, 3])):
            messages.append(
                {"role": "user", "content": f"Question {dice.randint(0, 12)}, part {turn}: please explain."}
            )
            messages.append({"role": "assistant", "content": f"Part {turn} of what is known about it."})
        body = {"model": "tiny", "max_tokens": dice.choice([48, 96, 192]), "messages": messages[:-1], "stream": True}
        headers = {"x-gateway-inference-objective": dice.choice(["critical", "standard", "standard", "sheddable"])}
        with suppress(aiohttp.ClientError):  # its pod was killed
            await stack.send("POST", "/v1/chat/completions", json=body, headers=headers)
        await asyncio.sleep(dice.random() * 0.2)


@asynccontextmanager
async def opened(browser: Browser, url: str, *, width: int, height: int, theme: str = "light") -> AsyncIterator[Page]:
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
        device_scale_factor=2 if width < 640 else 1,
    )
    page = await context.new_page()
    await page.goto(url)
    await feed_is(page, "live")
    yield page
    await context.close()


async def pictures(browser: Browser, url: str, folder: Path) -> None:
    await desk(browser, url, folder, theme="light")
    await desk(browser, url, folder, theme="dark")
    async with opened(browser, f"{url}/#/pods", width=390, height=780) as page:
        for view in ("pods", "latency"):
            await go(page, view)
            await page.screenshot(path=folder / f"page-{'' if view == 'pods' else f'{view}-'}phone.png")


async def desk(browser: Browser, url: str, folder: Path, *, theme: str) -> None:
    async with opened(browser, f"{url}/#/pods", width=1440, height=900, theme=theme) as page:
        await asyncio.sleep(5.0)
        for view in VIEWS if theme == "light" else DARK_VIEWS:
            await go(page, view)
            await page.screenshot(path=folder / f"page-{view}{'' if theme == 'light' else '-dark'}.png")
        if theme == "light":
            await go(page, "decisions")
            await page.click("#view-decisions .decision >> nth=3")
            await asyncio.sleep(0.5)
            await page.screenshot(path=folder / "page-explanation.png")
            await page.keyboard.press("Escape")
            await go(page, "try")
            await page.fill("#try-system", ROLES[0] * 5)
            await page.fill("#try-prompt", "Question 3, part 0: please explain.")
            await page.click("text=Explain")
            await page.wait_for_selector(".result .whither")
            await page.screenshot(path=folder / "page-try.png")


async def go(page: Page, view: str) -> None:
    await page.click(f"nav a[href='#/{view}']")
    await asyncio.sleep(1.0)


async def stopped_pod(browser: Browser, url: str, folder: Path) -> None:
    """A pod that was killed, among the others and by itself."""
    for width, height, name in ((1440, 900, ""), (390, 780, "-phone")):
        async with opened(browser, f"{url}/#/pods", width=width, height=height) as page:
            await expect(page.locator("button.pod.ill")).to_have_count(1)
            await asyncio.sleep(1.0)
            await page.screenshot(path=folder / f"page-stopped{name}.png")
            await page.click("button.pod.ill")
            await asyncio.sleep(0.5)
            await page.screenshot(path=folder / f"page-stopped-pod{name}.png")


async def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        async with (
            chromium() as browser,
            simulated_pods(PODS, *SMALL) as pods,
            running_stack(Path(made), endpoints=tuple(pods), settings=SETTINGS) as stack,
            asyncio.TaskGroup() as tasks,
        ):
            clients = [tasks.create_task(client(stack, i), name=f"client {i}") for i in range(CLIENTS)]
            try:
                await asyncio.sleep(SECONDS_BEFORE)
                await pictures(browser, stack.ready["admin"], folder)
                pods[list(pods)[4]].kill()
                await asyncio.sleep(10.0)
                await stopped_pod(browser, stack.ready["admin"], folder)
            finally:
                for each in clients:
                    each.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

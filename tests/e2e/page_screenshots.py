"""Makes the pictures of docs/guides/page.md: `python -m tests.e2e.page_screenshots FOLDER` starts a mesh."""

import asyncio
import random
import sys
import tempfile
from pathlib import Path

from playwright.async_api import Browser, Page

from tests.browser.chromium import chromium, feed_is
from tests.e2e.stack import Stack, running_stack

ROLES = (
    "You are the librarian of a small town. You answer in two sentences at most and name the shelf. ",
    "You are a careful SQL assistant. Answer with one query, and use only the tables that are named below. ",
    "Translate the user's text to French. Keep names as they are, and the line breaks where they were. ",
    "Summarise the following support ticket in three bullets for an engineer on call. ",
)
PODS = 12
CLIENTS = 10
SECONDS_BEFORE = 25.0
# caches that fill while one looks; a machine that is busy with the browser is no finding
SMALL = "kv_blocks: 100\nmax_model_len: 1500\nmax_num_seqs: 8\nindex_timeout_ms: 500\n"


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
        body = {"model": "tiny", "max_tokens": dice.choice([16, 48, 96]), "messages": messages[:-1]}
        headers = {"x-gateway-inference-objective": dice.choice(["critical", "standard", "standard", "sheddable"])}
        await stack.send("POST", "/v1/chat/completions", json=body, headers=headers)
        await asyncio.sleep(dice.random() * 0.2)


async def pictures(browser: Browser, url: str, folder: Path) -> None:
    await desk(browser, url, folder, theme="light")
    await desk(browser, url, folder, theme="dark")
    context = await browser.new_context(
        viewport={"width": 360, "height": 740}, device_scale_factor=2, color_scheme="light"
    )
    page = await context.new_page()
    await shown(page, f"{url}/#/pods")
    await page.screenshot(path=folder / "page-phone.png")
    await context.close()


async def desk(browser: Browser, url: str, folder: Path, *, theme: str) -> None:
    context = await browser.new_context(
        viewport={"width": 1440, "height": 900}, color_scheme="dark" if theme == "dark" else "light"
    )
    page = await context.new_page()
    await shown(page, f"{url}/#/pods")
    await asyncio.sleep(SECONDS_BEFORE if theme == "light" else 8.0)  # for the lines to have a past
    views = ("pods", "prefixes", "decisions", "classes", "index") if theme == "light" else ("pods", "prefixes")
    for view in views:
        await page.click(f"nav a[href='#/{view}']")
        await asyncio.sleep(1.0)
        await page.screenshot(path=folder / f"page-{view}{'' if theme == 'light' else '-dark'}.png")
    if theme == "light":
        await page.click("nav a[href='#/decisions']")
        await page.click("#view-decisions .decision >> nth=3")
        await asyncio.sleep(0.5)
        await page.screenshot(path=folder / "page-explanation.png")
        await page.keyboard.press("Escape")
        await page.click("nav a[href='#/try']")
        await page.fill("#try-system", ROLES[0] * 5)
        await page.fill("#try-prompt", "Question 3, part 0: please explain.")
        await page.click("text=Explain")
        await page.wait_for_selector(".result .whither")
        await page.screenshot(path=folder / "page-try.png")
    await context.close()


async def shown(page: Page, url: str) -> None:
    await page.goto(url)
    await feed_is(page, "live")


async def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        async with (
            chromium() as browser,
            running_stack(Path(made), pods=PODS, settings=SMALL) as stack,
            asyncio.TaskGroup() as tasks,
        ):
            clients = [tasks.create_task(client(stack, i), name=f"client {i}") for i in range(CLIENTS)]
            try:
                await asyncio.sleep(5.0)
                await pictures(browser, stack.ready["admin"], folder)
            finally:
                for each in clients:
                    each.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

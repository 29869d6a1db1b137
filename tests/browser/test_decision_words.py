"""Why a pod was picked, in the same words on the page and in `GET /state`, which `kvmesh top` prints."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace
from playwright.async_api import Browser

from extproc.pages.decision_words import why
from extproc.pages.picker_state import CandidateState, DecisionState
from tests.browser import feed_data
from tests.browser.chromium import chromium, opened
from tests.browser.fake_picker import FakePicker, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

SENTENCES = """async (decisions) => {
  const { sentences } = await import("/page/explanation.js");
  return decisions.map((decision) => sentences(decision, (address) => address));
}"""
WEIGHTS = {"prefix": 4.0, "queue-depth": 1.0, "kv-usage": 1.0, "turn": 0.5, "lora": 0.0}


def candidate(endpoint: str, total: float | None, **scores: float) -> CandidateState:
    named = {name.replace("_", "-"): score for name, score in scores.items()}
    return CandidateState(endpoint=endpoint, total=total, scores=named)


def decision(*candidates: CandidateState, **fields: Any) -> DecisionState:
    """Return a decision for the first candidate."""
    known: dict[str, Any] = {
        "prompt_tokens": 12_000,
        "matched_tokens": 8_000,
        "best_matched_tokens": 8_000,
        "weights": WEIGHTS,
    }
    return DecisionState(endpoint="a", strategy="kv-aware", candidates=candidates, **known | fields)


A, B = candidate("a", 5.0, prefix=1.0, queue_depth=1.0), candidate("b", 2.0, prefix=0.5)
TWO = decision(A, B)
DECISIONS = {
    "ahead": TWO,
    "ahead of many": replace(TWO, candidates_left_out=1234),
    "ahead and behind": decision(A, candidate("b", 4.0, prefix=0.5, queue_depth=1.0, kv_usage=0.6, turn=0.9)),
    "four reasons, three named": decision(candidate("a", 6.5, prefix=1, queue_depth=1, kv_usage=1, turn=1), B),
    "behind in equal parts": decision(A, candidate("b", 4.0, queue_depth=1.5, kv_usage=0.5, turn=1.0)),
    "behind in three": decision(
        candidate("a", 4.0, prefix=1.0), candidate("b", 3.5, queue_depth=1, kv_usage=1, turn=1)
    ),
    "half a hundredth": decision(candidate("a", 1.125, prefix=0.28125), candidate("b", 1.0, prefix=0.25)),
    "hardly behind": decision(candidate("a", 2.0, prefix=0.5), candidate("b", 2.003, queue_depth=2.003)),
    "two equal": replace(decision(A, candidate("b", 5.0, prefix=1.0, queue_depth=1.0)), as_good=2),
    "three of many equal": replace(
        decision(A, *(candidate(name, 5.0, prefix=1.0, queue_depth=1.0) for name in "bc"), candidates_left_out=7),
        as_good=3,
    ),
    "not the best": decision(A, candidate("b", 6.5, prefix=1.0), notes=["turn: b has had its turn"]),
    "not the best, by its strategy": decision(A, candidate("b", 6.5, prefix=1.0)),
    "the only one": decision(A),
    "one of two that are shown": decision(A, candidates_left_out=3),
    "no totals": decision(candidate("a", None), candidate("b", None)),
    "no prompt": replace(TWO, prompt_tokens=0, matched_tokens=0, best_matched_tokens=0),
    "cold": replace(TWO, matched_tokens=0, best_matched_tokens=0),
    "index unread": replace(
        TWO,
        matched_tokens=0,
        best_matched_tokens=0,
        degraded=["prefix-index-timeout"],
        notes=["prefix-index-timeout: 50 ms"],
    ),
    "more elsewhere": replace(TWO, best_matched_tokens=11_500),
    "all elsewhere": replace(TWO, matched_tokens=0, best_matched_tokens=1_234_567, prompt_tokens=1_300_000),
    "no weights": replace(TWO, weights={}),
    "candidates not known": replace(TWO, candidates=[]),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


async def test_the_page_and_the_picker_say_the_same_of_a_decision(browser: Browser) -> None:
    as_sent = [msgspec.json.decode(msgspec.json.encode(each)) for each in DECISIONS.values()]
    async with running(FakePicker(feed_data.snapshot(2))) as fake, opened(browser, fake.url) as page:
        said = await page.evaluate(SENTENCES, as_sent)
    # the page has the notes as well, each as a sentence
    on_page = {
        name: " ".join(lines[: len(lines) - len(each.notes)])
        for (name, each), lines in zip(DECISIONS.items(), said, strict=True)
    }
    assert on_page == {name: why(each) for name, each in DECISIONS.items()}
    assert len(set(on_page.values())) > 12  # they differ

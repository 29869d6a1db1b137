"""Whether a model's folder makes its pods' tokens, and what is made of it."""

import logging
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.folder_checks import PROBES, TokenChecks, TokenVerdict, tokens_of_probe
from extproc.prompts.pod_render import PodRender, RenderUnavailableError
from extproc.prompts.retries import FIRST_SECONDS
from extproc.prompts.tokenized_prompt import TokenizedPrompt
from extproc.prompts.tokenizer import ModelTokenizer
from podsim.model_folder import TINY_MODEL

MODEL = ServedModel(name="tiny", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=Path(TINY_MODEL))
TINY = ModelTokenizer.load(Path(TINY_MODEL))
TRUE, AWAY, REFUSES, ONE_MORE = "true", "away", "refuses", "one more"


class ScriptedPods:
    """Pods that answer probes each in its way."""

    def __init__(self, ways: Mapping[str, str]) -> None:
        self.ways = dict(ways)
        self.asked: list[str] = []

    async def ask_one(self, address: str, request: Any, body: bytes, *, model: ServedModel) -> TokenizedPrompt | None:
        self.asked.append(address)
        way = self.ways[address]
        if way == AWAY:
            raise RenderUnavailableError("not reached")
        if way == REFUSES:
            return None
        (tokens,) = TINY.token_buffers(request)
        return TokenizedPrompt(tokens=tokens + (array("I", [7]).tobytes() if way == ONE_MORE else b""))


class Checked:
    """Checks of one model before scripted pods, at a time that is told."""

    def __init__(self, ways: Mapping[str, str]) -> None:
        self.now = 0.0
        self.doubts: dict[str, str] = {}
        self.pods = ScriptedPods(ways)
        self.checks = TokenChecks(render=cast("PodRender", self.pods), doubts=self.doubts, clock=lambda: self.now)
        self.tokenizer = TINY

    async def look(self, *, serving: Sequence[str] | None = None, times: int = 1) -> TokenVerdict:
        pods = tuple(self.pods.ways) if serving is None else serving
        for _ in range(times):
            await self.checks.look({"tiny": self.tokenizer}, (MODEL,), lambda _: pods)
        return self.checks.states["tiny"].verdict

    @property
    def doubt(self) -> str | None:
        return self.doubts.get("tiny")


async def test_a_folder_is_exact_once_all_probes_of_a_pod_have_the_same_tokens() -> None:
    checked = Checked({"a:1": TRUE})
    assert await checked.look(serving=()) is TokenVerdict.UNVERIFIED
    assert await checked.look() is TokenVerdict.EXACT
    asked = len(checked.pods.asked)
    assert asked == sum(not isinstance(tokens_of_probe(probe, "tiny", TINY), str) for probe in PROBES)
    await checked.look(times=3)
    assert len(checked.pods.asked) == asked  # each pod is asked once
    assert checked.doubt is None


async def test_a_folder_that_differs_from_most_pods_is_not_believed_until_they_change() -> None:
    checked = Checked({"a:1": ONE_MORE})
    assert await checked.look() is TokenVerdict.DIFFERS
    assert "1 of 1 pods (a:1: completion: " in (checked.doubt or "")
    checked.pods.ways["b:1"] = TRUE
    assert await checked.look() is TokenVerdict.DIFFERS
    assert checked.doubt is None  # one of two: it may be the pod that is wrong
    checked.pods.ways["c:1"] = ONE_MORE
    assert await checked.look() is TokenVerdict.DIFFERS
    assert "2 of 3 pods" in (checked.doubt or "")
    checked.pods.ways = {"b:1": TRUE}
    checked.checks.keep(["b:1"])
    assert await checked.look() is TokenVerdict.EXACT
    assert checked.doubt is None


async def test_a_pod_that_was_started_again_is_asked_again() -> None:
    checked = Checked({"a:1": ONE_MORE})
    await checked.look()
    checked.pods.ways["a:1"] = TRUE
    assert await checked.look() is TokenVerdict.DIFFERS
    checked.checks.is_another("a:1")
    assert await checked.look() is TokenVerdict.EXACT
    assert checked.doubt is None


async def test_a_folder_that_was_loaded_again_is_compared_anew() -> None:
    checked = Checked({"a:1": ONE_MORE})
    await checked.look()
    checked.pods.ways["a:1"] = TRUE
    checked.tokenizer = ModelTokenizer.load(Path(TINY_MODEL))
    assert await checked.look() is TokenVerdict.EXACT
    assert checked.doubt is None


@pytest.mark.parametrize(("way", "why"), [(AWAY, "a:1: not reached"), (REFUSES, "a:1: it refuses all probes")])
async def test_a_pod_that_tells_nothing_is_asked_again_ever_more_rarely(way: str, why: str) -> None:
    checked = Checked({"a:1": way})
    assert await checked.look() is TokenVerdict.UNVERIFIED
    assert why in checked.checks.states["tiny"].why
    asked = len(checked.pods.asked)
    await checked.look(times=3)
    assert len(checked.pods.asked) == asked
    checked.now += FIRST_SECONDS
    await checked.look()
    assert len(checked.pods.asked) == 2 * asked
    checked.now += FIRST_SECONDS
    await checked.look()
    assert len(checked.pods.asked) == 2 * asked
    checked.pods.ways["a:1"] = TRUE
    checked.now += FIRST_SECONDS
    assert await checked.look() is TokenVerdict.EXACT


async def test_a_model_whose_folder_is_gone_has_no_verdict_and_no_doubt() -> None:
    checked = Checked({"a:1": ONE_MORE})
    await checked.look()
    await checked.checks.look({}, (MODEL,), lambda _: ("a:1",))
    assert (dict(checked.checks.states), checked.doubt) == ({}, None)


async def test_a_verdict_is_logged_once_and_a_change_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    checked = Checked({"a:1": AWAY})
    await checked.look(times=2)
    checked.pods.ways["a:1"] = TRUE
    checked.now += FIRST_SECONDS
    await checked.look()
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == ["unverified"]
    checked.now += 60.0
    await checked.look()
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == ["unverified", "exact"]

"""The doctor and a picker that has just started: its tokens are judged once it has compared them with a pod."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pages.picker_state import PickerState
from extproc.prompts.folder_checks import TokenVerdict
from operate.doctor import gather_admin
from operate.doctor.facts import PickerFacts

FOLDER = ModelTable(served=(ServedModel(name="tiny", tokens_from=TokensFrom.TOKENIZER),))
PODS = ModelTable(served=(ServedModel(name="tiny"),))


@dataclass
class Page:
    content: Any


@dataclass
class Picker:
    """Answers /state: its last answer again and again."""

    answers: list[dict[str, tuple[str, str]]]
    asked: list[str] = field(default_factory=list)

    async def ask_admin(self, url: str) -> Page:
        self.asked.append(url)
        states = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Page(content=msgspec.to_builtins(PickerState(now=1.0, token_states=states)))


async def verdicts(picker: Picker, models: ModelTable, *, within: float, pool: str = "") -> dict[str, TokenVerdict]:
    found = await gather_admin.with_picker_tokens(
        picker,  # type: ignore[arg-type]
        PickerFacts(url="http://p"),
        models,
        within_seconds=within,
        pool=pool,
    )
    return {model: state.verdict for model, state in found.token_states.items()}


async def test_it_waits_for_the_first_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_admin, "COMPARED_PAUSE_SECONDS", 0)
    picker = Picker(answers=[{}, {"tiny": ("unverified", "")}, {"tiny": ("exact", "")}])
    assert await verdicts(picker, FOLDER, within=60, pool="llm/a") == {"tiny": TokenVerdict.EXACT}
    assert picker.asked == ["http://p/state?pool=llm%2Fa"] * 3


async def test_a_picker_that_compares_nothing_is_not_called_right() -> None:
    assert await verdicts(Picker(answers=[{}]), FOLDER, within=0) == {"tiny": TokenVerdict.UNVERIFIED}


async def test_without_a_folder_there_is_nothing_to_wait_for() -> None:
    picker = Picker(answers=[{}])
    assert await verdicts(picker, PODS, within=60) == {}
    assert picker.asked == ["http://p/state"]

"""Tokenizer folders that change while the picker runs, and that cannot be loaded at first."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from extproc.errors import TokenizerError
from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.retries import FIRST_SECONDS
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.prompts.tokenizer_cache import CHANGES, FolderFiles, TokenizerCache, folder_files

MODEL = ServedModel(name="m", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=Path("/models/m"))


class Folder:
    """A folder whose files and content are told."""

    def __init__(self) -> None:
        self.files = state(1)
        self.problem = ""
        self.loads = 0
        self.while_loading: Iterator[FolderFiles] = iter(())
        self.now = 0.0
        self.cache = TokenizerCache(self._load, files=lambda *_: self.files, clock=lambda: self.now)

    def _load(self, model: ServedModel) -> ModelTokenizer:
        self.loads += 1
        self.files = next(self.while_loading, self.files)
        if self.problem:
            raise TokenizerError(self.problem)
        return cast("ModelTokenizer", f"tokenizer {self.loads}")

    @property
    def loaded(self) -> Any:
        return None if self.cache.lacks((MODEL,)) else self.cache.get(MODEL)


def state(number: int) -> FolderFiles:
    return frozenset({("tokenizer.json", number, number, 1, number)})


async def test_a_folder_that_does_not_change_is_read_once() -> None:
    folder = Folder()
    await folder.cache.load((MODEL, MODEL))
    assert [await folder.cache.refresh() for _ in range(3)] == [False, False, False]
    assert (folder.loaded, folder.loads) == ("tokenizer 1", 1)


async def test_files_that_have_changed_are_taken_up_when_they_stand_still() -> None:
    folder = Folder()
    await folder.cache.load((MODEL,))
    folder.files = state(2)
    assert not await folder.cache.refresh()
    folder.files = state(3)
    assert not await folder.cache.refresh()  # they are being written
    assert folder.loaded == "tokenizer 1"
    assert await folder.cache.refresh()
    assert (folder.loaded, folder.loads) == ("tokenizer 2", 2)


async def test_a_folder_that_cannot_be_loaded_is_tried_again_ever_more_rarely() -> None:
    folder = Folder()
    folder.problem = "there is no tokenizer.json"
    await folder.cache.load((MODEL,))
    assert (folder.loaded, folder.cache.problem(MODEL)) == (None, folder.problem)
    await folder.cache.load((MODEL,))
    assert (await folder.cache.refresh(), folder.loads) == (False, 1)
    folder.now += FIRST_SECONDS
    await folder.cache.refresh()
    folder.now += FIRST_SECONDS
    await folder.cache.refresh()
    assert folder.loads == 2
    folder.problem, folder.now = "", folder.now + FIRST_SECONDS
    assert await folder.cache.refresh()
    assert (folder.loaded, folder.cache.problem(MODEL)) == ("tokenizer 3", None)


async def test_a_failed_folder_is_tried_at_once_when_its_files_change() -> None:
    folder = Folder()
    folder.problem = "half there"
    await folder.cache.load((MODEL,))
    folder.problem, folder.files = "", state(2)
    assert not await folder.cache.refresh()
    assert await folder.cache.refresh()
    assert folder.loaded == "tokenizer 2"


async def test_what_was_loaded_before_is_used_while_a_new_folder_cannot_be() -> None:
    folder = Folder()
    await folder.cache.load((MODEL,))
    folder.files, folder.problem = state(2), "truncated"
    assert [await folder.cache.refresh() for _ in range(2)] == [False, False]
    assert folder.loaded == "tokenizer 1"
    assert folder.cache.problem(MODEL) == "truncated; what was loaded before is used"


async def test_files_that_change_while_they_are_read_are_read_again() -> None:
    folder = Folder()
    folder.while_loading = iter([state(2)])
    await folder.cache.load((MODEL,))
    assert (folder.loaded, folder.cache.problem(MODEL)) == (None, CHANGES)
    assert await folder.cache.refresh()
    assert folder.loaded == "tokenizer 2"


async def test_a_defect_of_a_loader_is_one_folders_trouble(caplog: pytest.LogCaptureFixture) -> None:
    def load(_: ServedModel) -> ModelTokenizer:
        raise ZeroDivisionError("0")

    cache = TokenizerCache(load, files=lambda *_: state(1), clock=lambda: 0.0)
    await cache.load((MODEL,))
    assert cache.problem(MODEL) == "ZeroDivisionError: 0"
    assert "cannot be used" in caplog.text


def test_files_that_are_exchanged_under_a_link_are_others(tmp_path: Path) -> None:
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tokenizer.json").write_text("{}")
    volume = tmp_path / "m"
    volume.mkdir()
    (tmp_path / "data").symlink_to("one")
    (volume / "tokenizer.json").symlink_to("../data/tokenizer.json")
    before = folder_files(volume, None)
    assert folder_files(volume, None) == before
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(tmp_path / "data")
    assert folder_files(volume, None) != before


def test_what_cannot_be_looked_at_is_a_state_too(tmp_path: Path) -> None:
    nowhere = folder_files(tmp_path / "m", tmp_path / "chat.jinja")
    assert nowhere == folder_files(tmp_path / "m", tmp_path / "chat.jinja")
    (tmp_path / "m").mkdir()
    there = folder_files(tmp_path / "m", tmp_path / "chat.jinja")
    assert there != nowhere
    (tmp_path / "m" / "model.safetensors").write_text("weights")
    with_weights = folder_files(tmp_path / "m", tmp_path / "chat.jinja")
    (tmp_path / "m" / "model.safetensors").write_text("other, longer weights")
    assert folder_files(tmp_path / "m", tmp_path / "chat.jinja") == with_weights != there

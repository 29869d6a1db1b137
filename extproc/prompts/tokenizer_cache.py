"""The loaded tokenizers: one per folder and template, shared by all pools that serve the model.

Loading takes up to seconds, so it happens in a thread while requests are served. Folders change while the picker runs:
a volume is swapped, a download ends. `refresh` checks the metadata of their files, reloads folders that have changed
and settled, and retries failed ones. The old tokenizer stays in use until a new one is loaded.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from extproc.errors import PromptTokensError
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.prompts.prompt_tokens import load_tokenizer
from extproc.prompts.retries import Retries
from extproc.prompts.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

CHANGES = "its files change while they are read"
# one tuple per file, or per error; only for comparison
FolderFiles: TypeAlias = frozenset[tuple[str, int, int, int, int]]

MOST_NAMES = 2_000  # per folder: bounds the time; no real folder has more
READ = (".json", ".jinja", ".model", ".txt")  # vocabularies and merges are texts; weights count by name only


def folder_files(folder: Path | None, template: Path | None) -> FolderFiles:
    """Return name, size, modification time, device and inode of the files; of weights only the name. Never raises.

    Links are followed: in a ConfigMap or an atomically swapped volume, the files are links into a folder that gets
    replaced.
    """
    found = [] if folder is None else [*_in_folder(folder), *_in_folder(folder / "additional_chat_templates")]
    if template is not None:
        found.append(_of_file(template.name, template))
    return frozenset(found)


def _in_folder(folder: Path) -> Iterator[tuple[str, int, int, int, int]]:
    try:
        names = [path.name for path in islice(folder.iterdir(), MOST_NAMES)]
    except OSError as error:
        yield str(folder), 0, 0, 0, -(error.errno or 1)
        return
    for name in names:
        is_read = name.endswith(READ) or name.startswith("tokenizer")
        yield _of_file(name, folder / name) if is_read else (name, 0, 0, 0, 0)


def _of_file(name: str, path: Path) -> tuple[str, int, int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        return name, 0, 0, 0, -(error.errno or 1)
    return name, status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


@dataclass(slots=True)
class _Folder:
    model: ServedModel  # the first that needed it
    tokenizer: ModelTokenizer | None = None
    read: FolderFiles | None = None  # the state of the files at the last load
    seen: FolderFiles | None = None  # the state of the files at the last check
    problem: str = ""  # why the last attempt failed
    retries: Retries = field(default_factory=Retries)

    def is_due(self, now: float) -> bool:
        return (self.tokenizer is None or bool(self.problem)) and self.retries.is_due(now)


class TokenizerCache:
    """Loads each tokenizer once, and again when its folder changes."""

    def __init__(
        self,
        load: Callable[[ServedModel], ModelTokenizer] = load_tokenizer,
        *,
        files: Callable[[Path | None, Path | None], FolderFiles] = folder_files,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`files(folder, template)` returns a comparable state of the files; it and `load` may block."""
        self._load = load
        self._files = files
        self._clock = clock
        self._folders: dict[Hashable, _Folder] = {}
        self._one_at_a_time = asyncio.Lock()  # hundreds of pools may need the same tokenizer

    def get(self, model: ServedModel) -> ModelTokenizer:
        """Return the model's tokenizer, loading it if necessary. Raise TokenizerError or ChatTemplateError."""
        folder = self._folder(model)
        if folder.tokenizer is None:
            folder.read = folder.seen = self._files(model.tokenizer_folder, model.chat_template)
            folder.tokenizer = self._load(model)
        return folder.tokenizer

    def lacks(self, models: Iterable[ServedModel]) -> bool:
        """Tell whether any of these models needs a tokenizer that is not loaded."""
        return any(
            model.tokens_from is TokensFrom.TOKENIZER
            and ((folder := self._folders.get(_key(model))) is None or folder.tokenizer is None)
            for model in models
        )

    def knows(self, model: ServedModel) -> bool:
        """Tell whether the model's folder has an entry, which `refresh` maintains."""
        return _key(model) in self._folders

    def problem(self, model: ServedModel) -> str | None:
        """Return why the last load of the model's folder failed, or None if it did not fail or was not tried."""
        folder = self._folders.get(_key(model)) if model.tokens_from is TokensFrom.TOKENIZER else None
        if folder is None or not folder.problem:
            return None
        return f"{folder.problem}; what was loaded before is used" if folder.tokenizer is not None else folder.problem

    def breach(self, model: ServedModel) -> str:
        """Return the limit that the model's chat template has broken too often to be used, or ""."""
        folder = self._folders.get(_key(model)) if model.tokens_from is TokensFrom.TOKENIZER else None
        return "" if folder is None or folder.tokenizer is None else folder.tokenizer.breach

    async def load(self, models: Iterable[ServedModel]) -> None:
        """Load missing and due tokenizers in a thread; an unusable one is logged and skipped."""
        for model in models:
            async with self._one_at_a_time:
                if self.lacks((model,)) and (folder := self._folder(model)).is_due(self._clock()):
                    await self._load_one(folder)

    async def refresh(self) -> bool:
        """Reload folders that have changed and settled, and retry failed ones; return whether any was loaded.

        Call it every few seconds: files that are being written change from one call to the next.
        """
        has_new = False
        for key, folder in tuple(self._folders.items()):
            model, before = folder.model, folder.seen
            folder.seen = await asyncio.to_thread(self._files, model.tokenizer_folder, model.chat_template)
            stands_still = folder.seen == before
            if stands_still and (folder.seen != folder.read or folder.is_due(self._clock())):
                async with self._one_at_a_time:
                    if self._folders.get(key) is folder:  # not dropped meanwhile
                        has_new |= await self._load_one(folder)
        return has_new

    def keep(self, models: Iterable[ServedModel]) -> None:
        """Drop all others: policies keep naming new ones, and one tokenizer takes a hundred megabytes or more."""
        kept = {_key(model) for model in models}
        self._folders = {key: folder for key, folder in self._folders.items() if key in kept}

    def _folder(self, model: ServedModel) -> _Folder:
        key = _key(model)
        folder = self._folders.get(key)
        if folder is None:
            folder = self._folders[key] = _Folder(model)
        return folder

    async def _load_one(self, folder: _Folder) -> bool:
        model = folder.model
        try:
            tokenizer, after = await asyncio.to_thread(self._load_between_looks, folder)
            if folder.read != after:
                folder.seen = after  # do not read again until the files settle
                raise PromptTokensError(CHANGES)
        except PromptTokensError as error:
            problem = str(error)
        except Exception as error:  # a policy may name any folder
            log.exception("the tokenizer of %s cannot be used", model.name)
            problem = f"{type(error).__name__}: {error}"
        else:
            if folder.tokenizer is not None or folder.problem:
                log.info("the tokenizer of %s was loaded again: its folder has changed", model.name)
            folder.tokenizer, folder.problem, folder.retries = tokenizer, "", Retries()
            return True
        folder.problem = problem
        folder.retries.failed(self._clock())
        return False

    def _load_between_looks(self, folder: _Folder) -> tuple[ModelTokenizer, FolderFiles]:
        """Return the tokenizer, and the files' state afterwards; `read` gets the state before, even if it fails."""
        model = folder.model
        folder.read = self._files(model.tokenizer_folder, model.chat_template)
        return self._load(model), self._files(model.tokenizer_folder, model.chat_template)


def without_missing(table: ModelTable, tokenizers: TokenizerCache) -> ModelTable:
    """Return the table with AUTO for models whose tokenizers are not loaded yet: their pods are asked instead."""
    return replace(
        table,
        served=tuple(
            replace(model, tokens_from=TokensFrom.AUTO) if tokenizers.lacks((model,)) else model
            for model in table.served
        ),
    )


def _key(model: ServedModel) -> Hashable:
    return model.tokenizer_folder, model.chat_template, repr(sorted(model.chat_template_kwargs.items()))

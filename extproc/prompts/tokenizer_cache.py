"""The tokenizers that are loaded: one for each folder and template, however many pools serve the model.

Loading takes up to seconds, so it happens in a thread while requests are served. Folders change while the picker runs:
a volume is swapped, a download ends. `refresh` looks at their files, loads again what has changed and stands still, and
tries again what could not be loaded. What was loaded before is used until there is something better.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from extproc.errors import PromptTokensError
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.prompts.prompt_tokens import load_tokenizer
from extproc.prompts.retries import Retries
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.prompts.tokenizer_files import FolderFiles, folder_files

log = logging.getLogger(__name__)

CHANGES = "its files change while they are read"


@dataclass(slots=True)
class _Folder:
    """One folder and template."""

    model: ServedModel  # the first that wanted it
    tokenizer: ModelTokenizer | None = None
    read: FolderFiles | None = None  # as they were when they were last read
    seen: FolderFiles | None = None  # as they were at the last look
    problem: str = ""  # why the last attempt failed
    retries: Retries = field(default_factory=Retries)

    def is_due(self, now: float) -> bool:
        """Whether it is to be loaded: never tried, or failed long enough ago."""
        return (self.tokenizer is None or bool(self.problem)) and self.retries.is_due(now)


class TokenizerCache:
    """Keeps each tokenizer that was loaded."""

    def __init__(
        self,
        load: Callable[[ServedModel], ModelTokenizer] = load_tokenizer,
        *,
        files: Callable[[Path | None, Path | None], FolderFiles] = folder_files,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`files(folder, template)` tells one state of the files from another; it and `load` may block."""
        self._load = load
        self._files = files
        self._clock = clock
        self._folders: dict[Hashable, _Folder] = {}
        self._one_at_a_time = asyncio.Lock()  # hundreds of pools may want the same one

    def get(self, model: ServedModel) -> ModelTokenizer:
        """Return the model's tokenizer, loaded now if need be. Raise TokenizerError or ChatTemplateError."""
        folder = self._folder(model)
        if folder.tokenizer is None:
            folder.read = folder.seen = self._files(model.tokenizer_folder, model.chat_template)
            folder.tokenizer = self._load(model)
        return folder.tokenizer

    def lacks(self, models: Iterable[ServedModel]) -> bool:
        """Tell whether any of these has a tokenizer that is not loaded."""
        return any(
            model.tokens_from is TokensFrom.TOKENIZER
            and ((folder := self._folders.get(_key(model))) is None or folder.tokenizer is None)
            for model in models
        )

    def knows(self, model: ServedModel) -> bool:
        """Tell whether the model's folder was wanted before: `refresh` then looks after it."""
        return _key(model) in self._folders

    def problem(self, model: ServedModel) -> str | None:
        """Return why the model's folder could not be loaded the last time, None where it could or was not tried."""
        folder = self._folders.get(_key(model)) if model.tokens_from is TokensFrom.TOKENIZER else None
        if folder is None or not folder.problem:
            return None
        return f"{folder.problem}; what was loaded before is used" if folder.tokenizer is not None else folder.problem

    async def load(self, models: Iterable[ServedModel]) -> None:
        """Load in a thread what is missing and due; a tokenizer that cannot be used is logged and left out."""
        for model in models:
            async with self._one_at_a_time:
                if self.lacks((model,)) and (folder := self._folder(model)).is_due(self._clock()):
                    await self._load_one(folder)

    async def refresh(self) -> bool:
        """Load again what has changed and stands still, or has failed; return whether there are new tokenizers.

        To be called every few seconds: files that are being written change from one call to the next.
        """
        has_new = False
        for key, folder in tuple(self._folders.items()):
            model, before = folder.model, folder.seen
            folder.seen = await asyncio.to_thread(self._files, model.tokenizer_folder, model.chat_template)
            stands_still = folder.seen == before
            if stands_still and (folder.seen != folder.read or folder.is_due(self._clock())):
                async with self._one_at_a_time:
                    if self._folders.get(key) is folder:  # it was not let go of meanwhile
                        has_new |= await self._load_one(folder)
        return has_new

    def keep(self, models: Iterable[ServedModel]) -> None:
        """Drop all others: policies name new ones for ever, and one takes a hundred megabytes and more."""
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
                folder.seen = after  # no more reading until they stand still
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
        """Return the tokenizer, and the files as they are afterwards; those of before are noted even if it fails."""
        model = folder.model
        folder.read = self._files(model.tokenizer_folder, model.chat_template)
        return self._load(model), self._files(model.tokenizer_folder, model.chat_template)


def without_missing(table: ModelTable, tokenizers: TokenizerCache) -> ModelTable:
    """Return the table with AUTO for the models whose tokenizers are not loaded yet: their pods are asked."""
    return replace(
        table,
        served=tuple(
            replace(model, tokens_from=TokensFrom.AUTO) if tokenizers.lacks((model,)) else model
            for model in table.served
        ),
    )


def _key(model: ServedModel) -> Hashable:
    return model.tokenizer_folder, model.chat_template, repr(sorted(model.chat_template_kwargs.items()))

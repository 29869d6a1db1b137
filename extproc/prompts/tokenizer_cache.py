"""The tokenizers that are loaded: one for each folder and template, however many pools serve the model.

Loading takes up to seconds, so it happens in a thread while requests are served.
"""

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

from extproc.errors import PromptTokensError
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.prompts.prompt_tokens import load_tokenizer
from extproc.prompts.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)


class TokenizerCache:
    """Keeps each tokenizer that was loaded; folders are read once."""

    def __init__(self, load: Callable[[ServedModel], ModelTokenizer] = load_tokenizer) -> None:
        self._load = load
        self._loaded: dict[Hashable, ModelTokenizer] = {}
        self._one_at_a_time = asyncio.Lock()  # hundreds of pools may want the same one

    def get(self, model: ServedModel) -> ModelTokenizer:
        """Return the model's tokenizer, loaded now if need be. Raise TokenizerError or ChatTemplateError."""
        key = _key(model)
        found = self._loaded.get(key)
        if found is None:
            found = self._loaded[key] = self._load(model)
        return found

    def lacks(self, models: Iterable[ServedModel]) -> bool:
        """Tell whether any of these has a tokenizer that is not loaded."""
        return any(model.tokens_from is TokensFrom.TOKENIZER and _key(model) not in self._loaded for model in models)

    async def load(self, models: Iterable[ServedModel]) -> None:
        """Load in a thread what is missing; a tokenizer that cannot be used is logged and left out."""
        for model in models:
            async with self._one_at_a_time:
                if self.lacks((model,)):
                    await self._load_one(model)

    def keep(self, models: Iterable[ServedModel]) -> None:
        """Drop all others: policies name new ones for ever, and one takes a hundred megabytes and more."""
        kept = {_key(model) for model in models}
        self._loaded = {key: loaded for key, loaded in self._loaded.items() if key in kept}

    async def _load_one(self, model: ServedModel) -> None:
        try:
            self._loaded[_key(model)] = await asyncio.to_thread(self._load, model)
        except PromptTokensError as error:
            log.error("the tokenizer of %s cannot be used; its pods are asked: %s", model.name, error)
        except Exception:  # a policy may name any folder
            log.exception("the tokenizer of %s cannot be used; its pods are asked", model.name)


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

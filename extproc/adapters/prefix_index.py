"""The prefix index in Redis as the picker sees it: translates `kv_indexer.api` and its errors into the port's."""

import logging
from collections.abc import Sequence

from extproc.core.prompt_match import BlockHits
from extproc.errors import PrefixIndexUnavailableError
from kv_indexer.api import IndexUnavailableError, PrefixIndexReader, SourceStatus, root_key

log = logging.getLogger(__name__)


class RedisPrefixIndex:
    """Looks prompts up; remembers whether the last lookup worked so that pages and logs can say so."""

    def __init__(self, *, url: str, hash_seed: str) -> None:
        self._reader = PrefixIndexReader(url=url, hash_seed=hash_seed)
        self._hash_seed = hash_seed
        self._roots: dict[str, bytes] = {}
        self.problem: str | None = None

    async def lookup(self, tokens: bytes, *, model: str, cache_salt: str | None) -> BlockHits:
        """Find who holds the leading blocks of the prompt. Raise PrefixIndexUnavailableError."""
        try:
            hits = await self._reader.lookup(tokens, root=self._root(model, cache_salt))
        except IndexUnavailableError as error:
            self._note(str(error))
            raise PrefixIndexUnavailableError(str(error)) from error
        self._note(None)
        return hits

    async def sources(self) -> Sequence[SourceStatus]:
        """Return what the index knows of each source. Raise PrefixIndexUnavailableError."""
        try:
            return await self._reader.sources()
        except IndexUnavailableError as error:
            raise PrefixIndexUnavailableError(str(error)) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._reader.close()

    def _root(self, model: str, cache_salt: str | None) -> bytes:
        if cache_salt is not None:  # chosen by clients: not worth remembering
            return root_key(hash_seed=self._hash_seed, model=model, cache_salt=cache_salt)
        root = self._roots.get(model)
        if root is None:  # bounded: the picker asks for its configured model only
            root = self._roots[model] = root_key(hash_seed=self._hash_seed, model=model)
        return root

    def _note(self, problem: str | None) -> None:
        if (problem is None) != (self.problem is None):
            if problem is None:
                log.info("the prefix index answers again")
            else:
                log.error("the prefix index does not answer: %s; requests are routed on load", problem)
        self.problem = problem

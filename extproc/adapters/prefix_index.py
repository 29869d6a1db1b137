"""The prefix index in Redis as the picker sees it: sets the deadline, translates `kv_indexer.api` into the port."""

import asyncio
import logging
from collections.abc import Sequence

from extproc.core.prompt_match import IndexHits
from extproc.errors import ConfigError, PrefixIndexError, PrefixIndexTimeoutError, PrefixIndexUnavailableError
from kv_indexer.api import (
    IndexStatus,
    IndexUnavailableError,
    PrefixIndexReader,
    RedisAccess,
    RedisUrlError,
    root_key,
)

log = logging.getLogger(__name__)

NO_INDEXER = "no indexer is alive: the index stands still"


class RedisPrefixIndex:
    """Looks prompts up; remembers whether the last lookup worked so that pages and logs can say so."""

    def __init__(self, *, url: RedisAccess | str, hash_seed: str, timeout_seconds: float) -> None:
        try:
            self._reader = PrefixIndexReader(url=url, hash_seed=hash_seed)
        except RedisUrlError as error:
            raise ConfigError(f"--redis: {error}") from error
        self._hash_seed = hash_seed
        self._timeout_seconds = timeout_seconds
        self._roots: dict[str, bytes] = {}
        self.problem: str | None = None

    async def lookup(self, prompts: Sequence[bytes], *, model: str, cache_salt: str | None) -> IndexHits:
        """Find who holds the leading blocks of each prompt. Raise PrefixIndexError."""
        root = self._root(model, cache_salt)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                if len(prompts) == 1:  # nearly always, and a task more would cost more than the rest of this
                    found = [await self._reader.lookup(prompts[0], root=root)]
                else:
                    found = await asyncio.gather(*(self._reader.lookup(tokens, root=root) for tokens in prompts))
        except IndexUnavailableError as error:
            raise self._noted(PrefixIndexUnavailableError(str(error))) from error
        except TimeoutError:
            milliseconds = self._timeout_seconds * 1000
            raise self._noted(PrefixIndexTimeoutError(f"no answer within {milliseconds:g} ms")) from None
        stale = None if found[0].indexer_alive else NO_INDEXER
        self._note(stale)
        return IndexHits(prompts=found, stale_reason=stale)

    async def status(self) -> IndexStatus:
        """Return how the index stands, source by source. Raise PrefixIndexUnavailableError."""
        try:
            return await self._reader.status()
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

    def _noted(self, error: PrefixIndexError) -> PrefixIndexError:
        self._note(str(error))
        return error

    def _note(self, problem: str | None) -> None:
        """Log when the index begins or ceases to be usable, not each of the thousand requests between."""
        if problem is not None and self.problem is None:
            log.error("the prefix index cannot be relied on: %s", problem)
        elif problem is None and self.problem is not None:
            log.info("the prefix index answers again")
        self.problem = problem

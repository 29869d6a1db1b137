"""The prefix index in Redis as the picker sees it: sets the deadline, translates `kv_indexer.api` into the port.

What the other replicas have booked comes back in the same round trip (`SharedState`, where there is one).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from extproc.core.prompt_match import IndexHits, PromptKeys
from extproc.core.prompt_tokens import TokenizedPrompt
from extproc.core.shared_load import SharedView
from extproc.errors import ConfigError, PrefixIndexTimeoutError, PrefixIndexUnavailableError
from kv_indexer.api import (
    EndpointCache,
    IndexStatus,
    IndexUnavailableError,
    PrefixIndexReader,
    PrefixLookup,
    RedisAccess,
    RedisUrlError,
    block_keys,
    root_key,
)

log = logging.getLogger(__name__)

NO_INDEXER = "no indexer is alive: the index stands still"
STALE = "prefix-index-stale"
SHARED_LOAD = "shared-load-unavailable"
TOKEN_BYTES = 4
# what prompts are remembered under while no pod has told its block size: any serves, a pod's own is found later
USUAL_BLOCK_TOKENS = 16


class SharedLoad(Protocol):
    """What the replicas tell each other; see `adapters.shared_state.SharedState`."""

    def command(self, session: str | None = None, adapter: str | None = None) -> tuple[bytes, int]:
        """Return packed commands that go with a lookup, and the number of their replies."""

    def take(self, replies: Sequence[Any]) -> SharedView:
        """Read the replies to `command`."""

    def alone(self, why: str) -> SharedView:
        """Return what there is to go by when the others could not be asked."""

    async def read(self, session: str | None = None, adapter: str | None = None) -> SharedView:
        """Ask in a round trip of its own; never raises."""


class RedisPrefixIndex:
    """Looks prompts up; remembers whether the last lookup worked so that pages and logs can say so."""

    def __init__(
        self, *, url: RedisAccess | str, hash_seed: str, timeout_seconds: float, shared: SharedLoad | None = None
    ) -> None:
        try:
            self._reader = PrefixIndexReader(url=url, hash_seed=hash_seed)
        except RedisUrlError as error:
            raise ConfigError(f"--redis: {error}") from error
        self._hash_seed = hash_seed
        self._timeout_seconds = timeout_seconds
        self._shared = shared
        self._roots: dict[tuple[str, str | None], bytes] = {}
        self._states: tuple[object, Mapping[str, str]] = (None, {})  # of the registry they were read from
        self._block_tokens = USUAL_BLOCK_TOKENS
        self.problem: str | None = None

    async def lookup(
        self,
        prompts: Sequence[TokenizedPrompt],
        *,
        model: str,
        adapter: str | None = None,
        cache_salt: str | None = None,
        session: str | None = None,
    ) -> IndexHits:
        """Find who holds the leading blocks of each prompt; what fails is in the answer, nothing is raised."""
        if not prompts:
            return await self._nothing_to_look_up(session, adapter)
        root = self._root(model, adapter, cache_salt)
        also, also_replies = self._shared.command(session, adapter) if self._shared is not None else (b"", 0)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                first = self._look(prompts[0], root, also, also_replies)
                # nearly always one, and a task more would cost more than the rest of this
                found = (
                    [await first]
                    if len(prompts) == 1
                    else await asyncio.gather(first, *(self._look(prompt, root, b"", 0) for prompt in prompts[1:]))
                )
        except IndexUnavailableError as error:
            return self._failed(prompts, root, PrefixIndexUnavailableError.reason, str(error))
        except TimeoutError:
            words = f"no answer within {self._timeout_seconds * 1000:g} ms"
            return self._failed(prompts, root, PrefixIndexTimeoutError.reason, words)
        return self._hits(prompts, found, root, also_replies)

    async def status(self) -> IndexStatus:
        """Return how the index stands, source by source. Raise PrefixIndexUnavailableError."""
        try:
            return await self._reader.status()
        except IndexUnavailableError as error:
            raise PrefixIndexUnavailableError(str(error)) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._reader.close()

    async def _look(self, prompt: TokenizedPrompt, root: bytes, also: bytes, also_replies: int) -> PrefixLookup:
        extra = prompt.extra if prompt.features else None
        return await self._reader.lookup(prompt.tokens, root=root, extra=extra, also=also, also_replies=also_replies)

    async def _nothing_to_look_up(self, session: str | None, adapter: str | None) -> IndexHits:
        if self._shared is None:
            return IndexHits(states=self._states[1])
        view = await self._shared.read(session, adapter)
        degraded = {SHARED_LOAD: view.degraded} if view.degraded else {}
        return IndexHits(states=self._states[1], view=view, degraded=degraded)

    def _hits(
        self, prompts: Sequence[TokenizedPrompt], found: Sequence[PrefixLookup], root: bytes, also_replies: int
    ) -> IndexHits:
        first = found[0]
        degraded: dict[str, str] = {}
        if not first.indexer_alive:
            degraded[STALE] = NO_INDEXER
        self._note(degraded.get(STALE))
        view = None
        if self._shared is not None:
            view = self._shared.take(first.also) if also_replies else self._shared.take(())
            if view.degraded:
                degraded[SHARED_LOAD] = view.degraded
        return IndexHits(
            prompts=found,
            keys=[self._keys(prompt, lookup, root) for prompt, lookup in zip(prompts, found, strict=True)],
            states=self._states_of(first.endpoints) if first.indexer_alive else {},
            view=view,
            degraded=degraded,
        )

    def _keys(self, prompt: TokenizedPrompt, lookup: PrefixLookup, root: bytes) -> PromptKeys:
        if not lookup.keys:  # nobody has stored a block yet
            return self._own_keys(prompt, root)
        size = min(lookup.keys)
        self._block_tokens = size
        return PromptKeys(keys=lookup.keys[size], tokens_each=size)

    def _own_keys(self, prompt: TokenizedPrompt, root: bytes) -> PromptKeys:
        """Return what the index would have returned; for as long as it does not."""
        size = self._block_tokens
        if not prompt.features:
            return PromptKeys(keys=self._reader.block_keys(prompt.tokens, root=root, block_size=size), tokens_each=size)
        extra = prompt.extra(size)  # noqa: S610 - no Django here
        tokens = prompt.tokens[: max(len(prompt.tokens) - TOKEN_BYTES, 0)]  # the last one is never cached
        return PromptKeys(keys=block_keys(tokens, block_size=size, parent=root, extra=extra), tokens_each=size)

    def _states_of(self, endpoints: Mapping[str, EndpointCache]) -> Mapping[str, str]:
        """Return endpoint -> state of its events, made once a registry."""
        known, states = self._states
        if known is not endpoints:
            states = {endpoint: cache.state.value for endpoint, cache in endpoints.items()}
            self._states = endpoints, states
        return states

    def _root(self, model: str, adapter: str | None, cache_salt: str | None) -> bytes:
        if cache_salt is not None:  # chosen by clients: not worth remembering
            return root_key(hash_seed=self._hash_seed, model=model, lora=adapter, cache_salt=cache_salt)
        root = self._roots.get((model, adapter))
        if root is None:  # bounded: served models, and adapters that a pod or the configuration names
            root = self._roots[model, adapter] = root_key(hash_seed=self._hash_seed, model=model, lora=adapter)
        return root

    def _failed(self, prompts: Sequence[TokenizedPrompt], root: bytes, reason: str, words: str) -> IndexHits:
        self._note(words)
        view = self._shared.alone(words) if self._shared is not None else None
        if view is not None and view.degraded:
            words = f"{words}; {view.degraded}"  # one cause, one word
        keys = [self._own_keys(prompt, root) for prompt in prompts]
        return IndexHits(keys=keys, view=view, degraded={reason: words})

    def _note(self, problem: str | None) -> None:
        """Log when the index begins or ceases to be usable, not each of the thousand requests between."""
        if problem is not None and self.problem is None:
            log.error("the prefix index cannot be relied on: %s", problem)
        elif problem is None and self.problem is not None:
            log.info("the prefix index answers again")
        self.problem = problem

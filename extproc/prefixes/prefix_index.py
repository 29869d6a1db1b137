"""Look up a prompt's prefix in Redis, with a deadline; failures become degradations.

The other replicas' bookings and the quota's verdict come in the same round trip.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from msgspec import structs

from extproc.errors import PrefixIndexTimeoutError, PrefixIndexUnavailableError
from extproc.prefixes.prompt_match import IndexHits, PromptKeys
from extproc.prompts.tokenized_prompt import TOKEN_BYTES, TokenizedPrompt
from extproc.shared.quota import QUOTA_LOCAL, QuotaAsk, QuotaVerdict
from extproc.shared.shared_quotas import Quotas
from extproc.shared.shared_state import PoolShare
from kvmesh.blocks.block_keys import block_keys, root_key
from kvmesh.blocks.source import EndpointCache
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.prefix_match import PrefixLookup
from kvmesh.index.redis_reader import PrefixIndexReader

TURNS_TO_READ = 5  # of the event loop: one reads the socket, the others run the tasks that the answer wakes in turn


class LookupDeadlines:
    """Gives each lookup the same timeout, so that lookups expire in the order of their start: one timer serves all."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._open: deque[LookupDeadline] = deque()  # by deadline; finished ones are skipped
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self) -> "LookupDeadline":
        """Return a context manager that raises TimeoutError at the deadline."""
        return LookupDeadline(self)

    def add(self, deadline: "LookupDeadline", loop: asyncio.AbstractEventLoop) -> None:
        """Start the deadline's time."""
        deadline.at = loop.time() + self.seconds
        self._open.append(deadline)
        if self._timer is None:
            self._timer = loop.call_at(deadline.at, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        waiting = self._open
        now = loop.time()
        late = []
        while waiting and (waiting[0].is_over or waiting[0].at <= now):
            if not (deadline := waiting.popleft()).is_over:
                late.append(deadline)
        if waiting:
            self._timer = loop.call_at(waiting[0].at, self._look, loop)
        if late:
            loop.call_soon(_end, late, TURNS_TO_READ, loop)


class LookupDeadline:
    """The deadline of one lookup. Like `asyncio.timeout`, it is for one task and one use."""

    __slots__ = ("_cancelling", "_deadlines", "_task", "at", "is_late", "is_over")

    def __init__(self, deadlines: LookupDeadlines) -> None:
        self._deadlines = deadlines
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self.at = 0.0  # loop time
        self.is_over = False  # its context was left
        self.is_late = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "lookups are made in tasks"
        self._task = task
        self._cancelling = task.cancelling()
        self._deadlines.add(self, task.get_loop())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.is_over = True
        task, self._task = self._task, None
        # as in asyncio.timeout: a task also cancelled for another reason stays cancelled
        if self.is_late and task is not None and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def end(self) -> None:
        """Cancel the task if the lookup still waits."""
        if self._task is not None:
            self.is_late = True
            self._task.cancel()


def _end(late: list[LookupDeadline], turns: int, loop: asyncio.AbstractEventLoop) -> None:
    """After `turns` turns of the event loop, end the late lookups that still wait: an answer may just have arrived."""
    if turns:
        loop.call_soon(_end, late, turns - 1, loop)
        return
    for deadline in late:
        deadline.end()


log = logging.getLogger(__name__)

NO_INDEXER = "no indexer is alive: the index stands still"
STALE = "prefix-index-stale"
SHARED_LOAD = "shared-load-unavailable"
# for prompt keys while no pod has reported its block size: any size works until a pod's own is known
DEFAULT_BLOCK_TOKENS = 16


class RedisPrefixIndex:
    """Looks prompts up, and keeps the last lookup's problem for pages and logs."""

    def __init__(
        self,
        reader: PrefixIndexReader,
        *,
        hash_seed: str,
        timeout_seconds: float,
        quotas: Quotas,
        shared: PoolShare | None = None,
    ) -> None:
        """`reader` may be shared by several pools: lookups here use only this object's hash seed."""
        self._reader = reader
        self._hash_seed = hash_seed
        self._deadlines = LookupDeadlines(timeout_seconds)
        self._shared = shared
        self._quotas = quotas
        self._roots: dict[tuple[str, str | None], bytes] = {}
        self._states: tuple[object, Mapping[str, str]] = (None, {})  # with the registry they were read from
        self._block_tokens = DEFAULT_BLOCK_TOKENS
        self.problem: str | None = None

    async def lookup(
        self,
        prompts: Sequence[TokenizedPrompt],
        *,
        model: str,
        adapter: str | None = None,
        cache_salt: str | None = None,
        session: str | None = None,
        quota: QuotaAsk | None = None,
    ) -> IndexHits:
        """Find the holders of each prompt's leading blocks; failures are reported in the result, never raised."""
        if quota is not None and not (prompts and self._quotas.goes_with_lookups):
            # there is no lookup, or it goes to a read-only server
            lookup = self.lookup(prompts, model=model, adapter=adapter, cache_salt=cache_salt, session=session)
            hits, apart = await asyncio.gather(lookup, self._quotas.read(quota))
            return structs.replace(hits, quota=apart, degraded={**hits.degraded, **_local(apart)})
        if not prompts:
            return await self._nothing_to_look_up(session, adapter)
        root = self._root(model, adapter, cache_salt)
        also, shared_replies = self._shared.command(session, adapter) if self._shared is not None else (b"", 0)
        if quota is not None:
            also += self._quotas.command(quota)
        replies: list[Any] = []
        try:
            with self._deadlines():
                first = self._look(prompts[0], root, also, shared_replies + (quota is not None), replies)
                # nearly always one prompt; an extra task would cost more than the rest
                found = [await first] if len(prompts) == 1 else await self._look_all(first, prompts[1:], root)
        except IndexUnavailableError as error:
            reason, problem = PrefixIndexUnavailableError.reason, str(error)
        except TimeoutError:
            reason, problem = PrefixIndexTimeoutError.reason, f"no answer within {self._deadlines.seconds * 1000:g} ms"
        else:
            return self._hits(prompts, found, root, shared_replies, quota)
        verdict = None
        if quota is not None and replies:  # the first round trip may have brought it
            verdict = self._quotas.take(quota, replies[shared_replies:])
        elif quota is not None:  # on a timeout the server has probably taken from the quota
            is_late = reason == PrefixIndexTimeoutError.reason
            verdict = self._quotas.alone(quota, problem, was_done=is_late)
        return self._failed(prompts, root, reason, problem, verdict)

    def _look(
        self, prompt: TokenizedPrompt, root: bytes, also: bytes, also_replies: int, replies: list[Any]
    ) -> Coroutine[Any, Any, PrefixLookup]:
        """Look one prompt up; `replies` gets the replies to `also`, even if the lookup fails afterwards."""
        return self._reader.lookup(
            prompt.tokens,
            root=root,
            extra=prompt.extra if prompt.features else None,
            also=also,
            also_replies=also_replies,
            on_replies=replies.extend,
        )

    async def _look_all(
        self, first: Awaitable[PrefixLookup], prompts: Sequence[TokenizedPrompt], root: bytes
    ) -> Sequence[PrefixLookup]:
        """Wait for all lookups, so that the quota's reply, which comes with the first, survives another's failure."""
        others = (self._look(prompt, root, b"", 0, []) for prompt in prompts)
        found = await asyncio.gather(first, *others, return_exceptions=True)
        if (error := next((one for one in found if isinstance(one, BaseException)), None)) is not None:
            try:
                raise error
            finally:
                del error, found  # break the reference cycle through the traceback, which would keep the prompts
        return found  # type: ignore[return-value]  # no exceptions

    async def _nothing_to_look_up(self, session: str | None, adapter: str | None) -> IndexHits:
        if self._shared is None:
            return IndexHits(states=self._states[1])
        view = await self._shared.read(session, adapter)
        degraded = {SHARED_LOAD: view.degraded} if view.degraded else {}
        return IndexHits(states=self._states[1], view=view, degraded=degraded)

    def _hits(
        self,
        prompts: Sequence[TokenizedPrompt],
        found: Sequence[PrefixLookup],
        root: bytes,
        shared_replies: int,
        quota: QuotaAsk | None,
    ) -> IndexHits:
        first = found[0]
        degraded: dict[str, str] = {}
        if not first.indexer_alive:
            degraded[STALE] = NO_INDEXER
        problem = degraded.get(STALE)
        if problem is not self.problem:
            self._note(problem)
        view = None
        if self._shared is not None:
            view = self._shared.take(first.also[:shared_replies])
            if view.degraded:
                degraded[SHARED_LOAD] = view.degraded
        verdict = None
        if quota is not None:
            verdict = self._quotas.take(quota, first.also[shared_replies:])
            degraded.update(_local(verdict))
        return IndexHits(
            prompts=found,
            keys=(
                (self._keys(prompts[0], first, root),)
                if len(found) == 1
                else [self._keys(prompt, lookup, root) for prompt, lookup in zip(prompts, found, strict=True)]
            ),
            states=self._states_of(first.endpoints) if first.indexer_alive else {},
            view=view,
            quota=verdict,
            degraded=degraded,
        )

    def _keys(self, prompt: TokenizedPrompt, lookup: PrefixLookup, root: bytes) -> PromptKeys:
        if not lookup.keys:  # no pod has stored a block yet
            return self._own_keys(prompt, root)
        size = min(lookup.keys)
        self._block_tokens = size
        return PromptKeys(keys=lookup.keys[size], tokens_each=size)

    def _own_keys(self, prompt: TokenizedPrompt, root: bytes) -> PromptKeys:
        size = self._block_tokens
        if not prompt.features:
            return PromptKeys(keys=self._reader.block_keys(prompt.tokens, root=root, block_size=size), tokens_each=size)
        extra = prompt.extra(size)  # noqa: S610 - no Django here
        tokens = prompt.tokens[: max(len(prompt.tokens) - TOKEN_BYTES, 0)]  # the last token is never cached
        return PromptKeys(keys=block_keys(tokens, block_size=size, parent=root, extra=extra), tokens_each=size)

    def _states_of(self, endpoints: Mapping[str, EndpointCache]) -> Mapping[str, str]:
        known, states = self._states
        if known is not endpoints:
            states = {endpoint: cache.state.value for endpoint, cache in endpoints.items()}
            self._states = endpoints, states
        return states

    def _root(self, model: str, adapter: str | None, cache_salt: str | None) -> bytes:
        if cache_salt is not None:  # chosen by clients: an unbounded set, so not cached
            return root_key(hash_seed=self._hash_seed, model=model, lora=adapter, cache_salt=cache_salt)
        root = self._roots.get((model, adapter))
        if root is None:  # bounded: served models, and adapters of pods or the configuration
            root = self._roots[model, adapter] = root_key(hash_seed=self._hash_seed, model=model, lora=adapter)
        return root

    def _failed(
        self, prompts: Sequence[TokenizedPrompt], root: bytes, reason: str, problem: str, verdict: QuotaVerdict | None
    ) -> IndexHits:
        self._note(problem)
        view = self._shared.alone(problem) if self._shared is not None else None
        if view is not None and view.degraded:
            problem = f"{problem}; {view.degraded}"  # one cause, one degradation
        keys = [self._own_keys(prompt, root) for prompt in prompts]
        return IndexHits(keys=keys, view=view, quota=verdict, degraded={reason: problem, **_local(verdict)})

    def _note(self, problem: str | None) -> None:
        """Log only when the index becomes unusable or usable again, not for each request in between."""
        if problem is not None and self.problem is None:
            log.error("the prefix index cannot be relied on: %s", problem)
        elif problem is None and self.problem is not None:
            log.info("the prefix index answers again")
        self.problem = problem


def _local(verdict: QuotaVerdict | None) -> Mapping[str, str]:
    """Return the degradation if only this replica's share decided the quota."""
    return {} if verdict is None or verdict.degraded is None else {QUOTA_LOCAL: verdict.degraded}

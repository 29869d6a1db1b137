"""The pools that one picker serves: selected by gRPC metadata or host, changed while requests run.

A removed pool keeps its open requests until they end, and waiting ones for `RETURN_SECONDS`. If it returns before all
of them have ended, it continues with its old state.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from extproc.admission.classify import claims_named, headers_named
from extproc.answers.response_plan import ResponsePlan
from extproc.errors import KvmeshError, NoPoolForHostError, PickError, UnknownPoolError
from extproc.ext_proc.exchange import RequestFacts
from extproc.ledger import metrics
from extproc.ledger.facts import Decided, DecisionRecord, NoDecision, RequestOutcome
from extproc.ledger.ledger import Throttle
from extproc.models.learned_models import learned_models
from extproc.policy.model_tokens import ModelTokens
from extproc.policy.values import PoolConfig
from extproc.pools.booked_exchange import ReadResponse
from extproc.pools.plan_response import decision_headers, new_decision_id
from extproc.pools.pool import Pool
from extproc.pools.pool_hosts import PoolHosts, PoolPickers, pools_of_cluster
from extproc.pools.shared_resources import SharedResources
from extproc.scaling.seen import Signal
from kvmesh.metrics.registry import Registry

log = logging.getLogger(__name__)

AUTHORITY = ":authority"
LOOK_SECONDS = 1.0
LOOKS_BACK_EVERY = 5  # looks
SCALES_EVERY = 2  # looks
LOOKS_BACK_AT_REST = 30  # looks, for pools without requests: their pods are asked minutes apart
FOLDERS_EVERY_SECONDS = 5.0
TOKENIZERS_SECONDS = 5.0  # the longest wait for tokenizers at start-up; without them the pods can be asked
WATCHED_SECONDS = 900.0  # how long after its last pick a pool's predictions are checked
RETURN_SECONDS = 5.0  # for a deleted pool to be recreated: waiting requests then go on, otherwise they get a 503
MOST_COMPLAINTS = 1000  # remembered
FULL_MEMORY_POOLS = 4  # with more pools, each gets less routing memory


class Pools:
    """All pools; each runs its own scraper and quotas."""

    def __init__(self, resources: SharedResources, *, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called when the headers or claims to read from requests may have changed."""
        self._resources = resources
        self._changed = changed
        self._pools: dict[str, Pool] = {}
        self._leaving: dict[str, Pool] = {}  # removed, with open requests
        self._waits_until: dict[str, float] = {}  # leaving pool -> end of its requests' wait (monotonic seconds)
        self._only: Pool | None = None
        self._every_request: Pool | None = None  # the pool of --endpoints, which needs no route
        self._hosts = PoolHosts({})
        self._pickers = PoolPickers({})
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[str, tuple[asyncio.Task[None], ...]] = {}
        self._loading: set[asyncio.Task[None]] = set()
        self._given: dict[str, PoolConfig] = {}  # each pool's last configuration, without learned models
        self._one_at_a_time = asyncio.Lock()
        self._coming: Sequence[PoolConfig] = ()  # being applied; their headers and claims are already read
        self._memory_share = 1.0
        self._complaints: dict[tuple[str, str], Throttle] = {}  # (pool, error)
        self._are_known = asyncio.Event()
        self.registry = Registry()
        self._unrouted = self.registry.values(metrics.UNROUTED)

    # --- for requests ---------------------------------------------------------------------------------------------

    def of_request(self, facts: RequestFacts) -> Pool:
        """Return a request's pool: by its cluster, else its route's metadata, the picker's Service, or its host.

        Raise PickError without one.
        """
        if self._every_request is not None:
            return self._every_request
        try:
            for name in pools_of_cluster(facts.cluster) if facts.cluster else ():
                if name in self._pools:
                    return self._pools[name]
            if facts.pool:
                return self._named(facts.pool)
            called = self._pickers.pool_of(facts.called_as)
            if called is not None and called in self._pools:
                return self._pools[called]
            return self.for_host(facts.headers.get(AUTHORITY, ""))
        except PickError as refusal:
            self._unrouted.of(refusal.reason).value += 1
            self._tell_unrouted(facts, refusal)
            raise

    def response(self, plan: ResponsePlan) -> ReadResponse:
        """Open a response with the plan that its pick made, here or on another picker."""
        pool = self._pools.get(plan.pool) or self._leaving.get(plan.pool)
        # carry out the plan even for a pool unknown here
        return pool.response(plan) if pool is not None else ReadResponse(books=None, plan=plan)

    def for_host(self, authority: str) -> Pool:
        """Return the pool that serves the host, or the only one. Raise PickError."""
        name = self._hosts.pool_of(authority) if self._hosts else None
        pool = self._pools.get(name) if name is not None else self._only
        if pool is not None:
            return pool
        if not self._pools:
            raise UnknownPoolError("no pool is known here")
        raise NoPoolForHostError(f"no pool serves the host {authority[:200]!r}, and the gateway names none")

    def _named(self, name: str) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            raise UnknownPoolError(f"the pool {name[:200]!r} is not known here")
        return pool

    def _tell_unrouted(self, facts: RequestFacts, refusal: PickError) -> None:
        record = DecisionRecord(
            at=time.time(), id=new_decision_id(), facts=facts, model=None, outcome=NoDecision.of(refusal)
        )
        if self._resources.settings.decision_headers:
            refusal.headers = {**refusal.headers, **decision_headers(record.id)}
        watch, now = self._resources.watch, time.monotonic()
        arrival = watch.arrival("", facts, at=now)
        fact = Decided(arrival=arrival, outcome_kind=RequestOutcome.REFUSED, record=record, at=now)
        asyncio.get_running_loop().call_soon(watch.decided, fact)

    # --- the current pools ----------------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        """Return the pools' names."""
        return tuple(self._pools)

    @property
    def all(self) -> Mapping[str, Pool]:
        """Return the pools by name."""
        return self._pools

    @property
    def with_requests(self) -> Mapping[str, Pool]:
        """The pools by name, including removed ones that finish their requests."""
        return {**self._leaving, **self._pools}

    def pool(self, name: str) -> Pool | None:
        """Return the pool of this name, or None."""
        return self._pools.get(name)

    def signals(self, name: str) -> Mapping[str, Signal] | None:
        """Return a pool's scaling signals by role, for the roles in its policy, or None if there is no such pool."""
        pool = self._pools.get(name)
        return None if pool is None else pool.scale.signals

    def model_tokens(self) -> Mapping[str, Sequence[ModelTokens]]:
        """Return the observed token sources of each pool's models."""
        return {name: pool.model_tokens() for name, pool in self._pools.items()}

    def wanted_headers(self) -> frozenset[str]:
        """Return the request headers (lowercase) that any pool needs."""
        own = frozenset({AUTHORITY}) if self._resources.settings.follows_mesh else frozenset[str]()
        return own.union(
            *[pool.wanted_headers() for pool in self._pools.values()],
            *[config.models.sticky_headers() | headers_named(config.policy.priorities) for config in self._coming],
        )

    def wanted_claims(self) -> frozenset[str]:
        """Return the claims of a verified JWT that any pool needs."""
        return frozenset[str]().union(
            *[pool.wanted_claims() for pool in self._pools.values()],
            *[claims_named(config.policy.priorities) for config in self._coming],
        )

    # --- changes --------------------------------------------------------------------------------------------------

    async def apply(self, configs: Mapping[str, PoolConfig]) -> None:
        """Serve these pools with these configurations; unchanged pools are not touched.

        Open and waiting requests, bookings and quotas stay. If a pool cannot be set up, this is logged and it stays as
        it was; the others are served.
        """
        async with self._one_at_a_time:
            self._coming = tuple(configs.values())
            self._changed()
            self._memory_share = min(1.0, FULL_MEMORY_POOLS / max(len(configs), 1))
            for name in [name for name in self._pools if name not in configs]:
                with self._alone(name):
                    self._leave(name)
            for name, config in configs.items():
                pool = self._pools.get(name)
                if pool is not None:
                    pool.share_memory(self._memory_share)
                    if self._given.get(name) is config:
                        continue
                with self._alone(name):
                    self._set(config)
                await asyncio.sleep(0)  # each takes a millisecond or more, and there may be hundreds
            self._route()  # all at once: a host that moves between pools is never without one
            self._coming = ()
            self._changed()
            self._resources.tokenizers.keep(
                [model for pool in self.with_requests.values() for model in pool.declared_models()]
            )
        self._are_known.set()

    async def known(self) -> None:
        """Wait until pools have been applied once."""
        await self._are_known.wait()

    def _set(self, config: PoolConfig) -> None:
        name = config.name
        pool = self._pools.get(name)
        if pool is None:
            pool = self._leaving.pop(name, None)
            self._waits_until.pop(name, None)
            if pool is None:
                pool = Pool(config, self._resources)
                pool.told = partial(self._told, pool)
            else:
                pool.come_back()
            pool.share_memory(self._memory_share)
            self._pools[name] = pool
            self._start(pool)
            log.info("pool", extra={"pool": name, "endpoints": len(config.endpoints)})
        learned = self._as_learned(pool, config)
        if pool.given != learned:
            pool.apply(learned)
        self._given[name] = config
        self._start_quotas(pool)
        self._load_tokenizers(pool)

    def _leave(self, name: str) -> None:
        """Remove a pool. Open requests finish; queued ones wait RETURN_SECONDS for the pool to return."""
        pool = self._pools.pop(name)
        pool.scale.end()
        self._given.pop(name, None)
        log.info("the pool is gone", extra={"pool": name, "open_requests": pool.books.open_requests})
        self._leaving[name] = pool
        if any(pool.runtime.admission.waiting.values()):
            self._waits_until[name] = time.monotonic() + RETURN_SECONDS
        else:
            pool.leave()

    def _as_learned(self, pool: Pool, config: PoolConfig) -> PoolConfig:
        if not config.learns_models:
            return config
        told = [status.models for status in pool.endpoints.known(now=time.monotonic())]
        learned = pool.config.learned  # silent pods keep their models
        if any(told):
            learned = learned_models(told, folders=self._resources.settings.tokenizer_folders)
        return config if learned == config.learned else replace(config, learned=learned)

    def _learn(self, pool: Pool) -> None:
        config = self._as_learned(pool, pool.given)
        if config.learned != pool.config.learned:
            names = {each.name: sorted(each.aliases) for each in config.learned}
            log.info("the pods tell their models", extra={"pool": pool.name, "models": names})
            pool.apply(config)
            self._load_tokenizers(pool)

    def _told(self, pool: Pool) -> None:
        """Learn the models as soon as all new pods have answered: requests may be waiting for them."""
        if self._pools.get(pool.name) is pool:
            with self._alone(pool.name):
                self._learn(pool)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Log an error of one pool, so that it does not affect the others."""
        try:
            yield
        except Exception as error:
            if len(self._complaints) >= MOST_COMPLAINTS:
                self._complaints.clear()
            # the look that fails comes again each second, and each change of a pod applies all configurations
            if not self._complaints.setdefault((name, f"{type(error).__name__}: {error}"), Throttle()).passes():
                return
            if isinstance(error, KvmeshError):
                log.error("the pool cannot be served as it is configured: %s", error, extra={"pool": name})
            else:  # a bug
                log.exception("the pool has failed", extra={"pool": name})

    def _route(self) -> None:
        # a pool with declared hosts gets no other hosts, even if it is the only pool
        pools = tuple(self._pools.values())
        self._only = pools[0] if len(pools) == 1 and not pools[0].config.hosts else None
        self._every_request = next((pool for pool in pools if pool.config.from_flags), None)
        self._hosts = PoolHosts({name: pool.config.hosts for name, pool in self._pools.items()})
        self._pickers = PoolPickers({name: pool.config.endpoint_picker for name, pool in self._pools.items()})

    # --- tasks ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the scrapers, quotas, shared state and checks of all pools until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for pool in self._pools.values():
                self._start(pool)
                self._start_quotas(pool)
                self._load_tokenizers(pool)
            if self._resources.shared is not None:
                tasks.create_task(self._resources.shared.run(), name="share load")
            tasks.create_task(self._check_tokens(), name="check tokens")
            tasks.create_task(self._refresh_folders(), name="watch tokenizer folders")
            await self._watch()

    async def close(self) -> None:
        """Close all pools; call it after `run` has ended."""
        self._tasks = None
        for pool in self.with_requests.values():
            await pool.close()

    def end_waiting(self) -> None:
        """Refuse all waiting requests; none waits from now on."""
        for pool in self._pools.values():
            pool.runtime.admission.close()

    async def first_looks(self) -> None:
        """Wait until the index and every endpoint have been read once, and the models' tokenizers are loaded.

        Every wait has a deadline.
        """
        pools = tuple(self._pools.values())
        scrapes = [pool.endpoints.first_scrapes() for pool in pools]
        await asyncio.gather(self._resources.look_at_index(), *scrapes)
        await asyncio.gather(*[pool.answers() for pool in pools])
        if self._loading:  # tokenizers of declared models and of models learned from the pods
            await asyncio.wait(self._loading, timeout=TOKENIZERS_SECONDS)

    def _start(self, pool: Pool) -> None:
        if self._tasks is not None and pool.name not in self._running:
            task = self._tasks.create_task(pool.endpoints.run(), name=f"scrape pool {pool.name}")
            self._running[pool.name] = (task,)

    def _start_quotas(self, pool: Pool) -> None:
        """Start the quota task only once a pool has quotas: hundreds of pools may have none."""
        running = self._running.get(pool.name, ())
        if self._tasks is not None and len(running) == 1 and pool.quotas.is_used:
            task = self._tasks.create_task(pool.quotas.run(), name=f"share quotas of {pool.name}")
            self._running[pool.name] = (*running, task)

    def _load_tokenizers(self, pool: Pool) -> None:
        missing = pool.missing_tokenizers()
        if missing and self._tasks is not None:
            task = self._tasks.create_task(self._loaded(pool, missing), name=f"load tokenizers of {pool.name}")
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)

    async def _loaded(self, pool: Pool, missing: Sequence[Any]) -> None:
        with self._alone(pool.name):
            await self._resources.tokenizers.load(missing)
            pool.apply(pool.given)
            pool.tokens.reporter.look()

    async def _refresh_folders(self) -> None:
        while True:
            await asyncio.sleep(FOLDERS_EVERY_SECONDS)
            for pool in tuple(self._pools.values()) if self._resources.settings.tokenizer_folders is not None else ():
                with self._alone(pool.name):
                    if await asyncio.to_thread(pool.found_folders):
                        self._load_tokenizers(pool)
            if await self._resources.tokenizers.refresh():
                for pool in tuple(self.with_requests.values()):
                    with self._alone(pool.name):
                        pool.apply(pool.given)

    async def _check_tokens(self) -> None:
        """Compare the folders' tokens with the pods', one pod per model at each look."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for pool in tuple(self._pools.values()):
                with self._alone(pool.name):
                    await pool.check_tokens()

    async def _watch(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            looks += 1
            since = time.monotonic() - WATCHED_SECONDS
            for pool in tuple(self._pools.values()):
                every = LOOKS_BACK_EVERY if pool.runtime.picked_at > since else LOOKS_BACK_AT_REST
                if looks % SCALES_EVERY == 0:
                    with self._alone(pool.name):
                        pool.scale.look()
                        pool.first_pod.look()
                    await asyncio.sleep(0)  # there may be hundreds
                if pool.config.model is None and (not pool.config.learned or looks % every == 0):
                    with self._alone(pool.name):
                        self._learn(pool)
                if pool.runtime.picked_at > since and looks % LOOKS_BACK_EVERY == 0:
                    with self._alone(pool.name):
                        pool.realised_reporter.look()
                if looks % every == 0:
                    with self._alone(pool.name):
                        pool.tokens.reporter.look()
            self._end_waits()
            for pool in tuple(self._leaving.values()):
                # it may have returned while another pool was closed
                if pool.is_free and self._leaving.get(pool.name) is pool:
                    with self._alone(pool.name):
                        await self._end(pool)

    def _end_waits(self) -> None:
        """Refuse the waiting requests of pools that have not returned in time."""
        now = time.monotonic()
        for name in [name for name, until in self._waits_until.items() if now >= until]:
            del self._waits_until[name]
            with self._alone(name):
                self._leaving[name].leave()

    async def _end(self, pool: Pool) -> None:
        """Close a pool whose last request has ended."""
        del self._leaving[pool.name]
        self._waits_until.pop(pool.name, None)
        tasks = self._running.pop(pool.name, ())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await pool.close()

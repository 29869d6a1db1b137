"""The pools that one picker serves: told apart by gRPC metadata or host, changed while requests run.

A pool that goes keeps its open requests until they end, and waiting ones for `RETURN_SECONDS`; one that comes back
meanwhile goes on where it was.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from extproc.admission.classify import claims_named, headers_named
from extproc.errors import KvmeshError, NoPoolForHostError, PickError, UnknownPoolError
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.learned_models import learned_models
from extproc.policy.model_tokens import ModelTokens
from extproc.policy.pool_config import PoolConfig
from extproc.policy.scale_problems import ScaleProblem
from extproc.pools.booked_exchange import ReadResponse
from extproc.pools.decision_headers import decision_headers, new_decision_id
from extproc.pools.pool import Pool
from extproc.pools.pool_hosts import PoolHosts, PoolPickers, pools_of_cluster
from extproc.pools.shared_resources import SharedResources
from extproc.records.request_events import DecisionRecord, RequestOutcome
from extproc.responses.response_plan import ResponsePlan
from extproc.scaling.acting import WRONG, ActOutcome, ScaleWish
from extproc.scaling.seen import Signal
from extproc.telemetry import metrics
from kvmesh.metrics.registry import Registry

log = logging.getLogger(__name__)

AUTHORITY = ":authority"
LOOK_SECONDS = 1.0
LOOKS_BACK_EVERY = 5  # looks
SCALES_EVERY = 2  # looks
LOOKS_BACK_AT_REST = 30  # likewise, at the models of pools without requests: their pods are asked minutes apart
FOLDERS_EVERY_SECONDS = 5.0
TOKENIZERS_SECONDS = 5.0  # that a picker which starts waits for them: meanwhile the pods could be asked
WATCHED_SECONDS = 900.0  # after its last pick a pool is looked at so long
RETURN_SECONDS = 5.0  # for a pool that was deleted to be made anew: waiting requests go on then, and get a 503 else
FULL_MEMORY_POOLS = 4  # with more pools, each remembers less of what it has routed


class Pools:
    """All of them; each runs its own scraper and quotas."""

    def __init__(self, resources: SharedResources, *, changed: Callable[[], None] | None = None) -> None:
        """`changed` is told when requests are to be read for other headers or claims than before."""
        self._resources = resources
        self._changed = changed
        self._pools: dict[str, Pool] = {}
        self._leaving: dict[str, Pool] = {}  # with open requests
        self._waits_until: dict[str, float] = {}  # of these: until when (monotonic seconds) its requests go on waiting
        self._only: Pool | None = None
        self._every_request: Pool | None = None  # the pool of flags, which needs no route
        self._hosts = PoolHosts({})
        self._pickers = PoolPickers({})
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[str, tuple[asyncio.Task[None], ...]] = {}
        self._loading: set[asyncio.Task[None]] = set()
        self._given: dict[str, PoolConfig] = {}  # what each pool was last set up with, before what its pods tell
        self._one_at_a_time = asyncio.Lock()
        self._coming: Sequence[PoolConfig] = ()  # being applied: what they look at is read already
        self._memory_share = 1.0
        self._are_known = asyncio.Event()
        self.registry = Registry()
        self._unrouted = self.registry.values(metrics.UNROUTED)

    # --- for requests ---------------------------------------------------------------------------------------------

    def of_request(self, facts: RequestFacts) -> Pool:
        """Return the pool of a request: of its cluster, named by its route or by the picker's Service, or its host's.

        Raise PickError where there is none.
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
        """Open a response whose pick, here or on another picker, made this plan."""
        pool = self._pools.get(plan.pool) or self._leaving.get(plan.pool)
        # what a client was promised holds, also where the pool is not known here
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
        """Tell the observers of a request that belongs to no pool."""
        watch = self._resources.watch
        trace = watch.open("", facts) if watch.is_used else None
        if trace is not None:
            record = DecisionRecord(at=time.time(), id=new_decision_id(), facts=facts, model=None, outcome=refusal)
            if self._resources.settings.decision_headers:
                refusal.headers = {**refusal.headers, **decision_headers(record.id)}
            asyncio.get_running_loop().call_soon(trace.decided, RequestOutcome.REFUSED, record)

    # --- what there is --------------------------------------------------------------------------------------------

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
        """Return the pools by name, with those that only finish their requests."""
        return {**self._leaving, **self._pools}

    def pool(self, name: str) -> Pool | None:
        """Return the pool of this name."""
        return self._pools.get(name)

    def signals(self, name: str) -> Mapping[str, Signal] | None:
        """Return how many pods each role of a pool wants, of roles that its policy names; None: no such pool."""
        pool = self._pools.get(name)
        return None if pool is None else pool.scale.signals

    def scaled_roles(self, name: str) -> Collection[str]:
        """Return the roles of a pool for which its policy wants a signal."""
        pool = self._pools.get(name)
        return () if pool is None else tuple(pool.config.policy.autoscale.by_role)

    def scale_wishes(self) -> list[ScaleWish]:
        """Return what the pools' policies want written into the scale of Deployments."""
        return [wish for pool in self._pools.values() for wish in pool.scale.wishes()]

    def note_acts(self, outcomes: Sequence[ActOutcome]) -> None:
        """Take what has come of all wishes."""
        for name, pool in self._pools.items():
            pool.scale.acts = tuple(each for each in outcomes if each.wish.pool == name)

    def wrong_acts(self) -> Mapping[str, Sequence[ScaleProblem]]:
        """Return by pool which Deployments are not scaled as its policies want, and why."""
        found = {
            name: tuple(
                ScaleProblem(deployment=each.wish.deployment, reason=each.state.value, message=each.words)
                for each in pool.scale.acts
                if each.state in WRONG
            )
            for name, pool in self._pools.items()
        }
        return {name: problems for name, problems in found.items() if problems}

    def model_tokens(self) -> Mapping[str, Sequence[ModelTokens]]:
        """Return by pool where its models' tokens come from, as their requests have shown."""
        return {name: pool.model_tokens() for name, pool in self._pools.items()}

    def wanted_headers(self) -> frozenset[str]:
        """Return the request headers (lowercase) that any pool looks at."""
        own = frozenset({AUTHORITY}) if self._resources.settings.follows_mesh else frozenset[str]()
        return own.union(
            *[pool.wanted_headers() for pool in self._pools.values()],
            *[config.models.sticky_headers() | headers_named(config.policy.priorities) for config in self._coming],
        )

    def wanted_claims(self) -> frozenset[str]:
        """Return the claims of a verified JWT that any pool looks at."""
        return frozenset[str]().union(
            *[pool.wanted_claims() for pool in self._pools.values()],
            *[claims_named(config.policy.priorities) for config in self._coming],
        )

    # --- changes --------------------------------------------------------------------------------------------------

    async def apply(self, configs: Mapping[str, PoolConfig]) -> None:
        """Serve these pools so from now on; what is as it was is left alone.

        Open requests, waiting ones, bookings and quotas stay. A pool that cannot be set up is said in the log; the
        others are served, and it stays as it was.
        """
        async with self._one_at_a_time:
            self._coming = tuple(configs.values())
            self._tell_wanted()
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
                await asyncio.sleep(0)  # each costs a millisecond or more, and there may be hundreds
            self._route()  # at once for all: a host that moves to another pool is never without one
            self._coming = ()
            self._tell_wanted()
            self._resources.tokenizers.keep(
                [model for pool in self.with_requests.values() for model in pool.declared_models()]
            )
        self._are_known.set()

    async def known(self) -> None:
        """Wait until pools were applied once."""
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
        if pool.config != learned:
            pool.apply(learned)
        self._given[name] = config
        self._start_quotas(pool)
        self._load_tokenizers(pool)

    def _leave(self, name: str) -> None:
        """Take nothing new for a pool; what is open ends by itself, what waits goes on only if it soon comes back."""
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
        """Return the config with the models that the pool's pods tell, where it declares none."""
        if not config.learns_models:
            return config
        told = [status.models for status in pool.endpoints.known(now=time.monotonic())]
        learned = pool.config.learned  # pods that do not answer have not become others
        if any(told):
            learned = learned_models(told, folders=self._resources.settings.tokenizer_folders)
        return config if learned == config.learned else replace(config, learned=learned)

    def _learn(self, pool: Pool) -> None:
        """Go by the models that the pods tell by now."""
        config = self._as_learned(pool, pool.config)
        if config.learned != pool.config.learned:
            names = {each.name: sorted(each.aliases) for each in config.learned}
            log.info("the pods tell their models", extra={"pool": pool.name, "models": names})
            pool.apply(config)
            self._load_tokenizers(pool)

    def _told(self, pool: Pool) -> None:
        """Learn at once what the last of a pool's new pods has told: requests may wait for it."""
        if self._pools.get(pool.name) is pool:
            with self._alone(pool.name):
                self._learn(pool)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Say what goes wrong with one pool; the others are served all the same."""
        try:
            yield
        except KvmeshError as error:
            log.error("the pool cannot be served as it is configured: %s", error, extra={"pool": name})
        except Exception:  # a defect
            log.exception("the pool has failed", extra={"pool": name})

    def _tell_wanted(self) -> None:
        if self._changed is not None:
            self._changed()

    def _route(self) -> None:
        # one that says which hosts are its own gets no others, also while it is the only one
        pools = tuple(self._pools.values())
        self._only = pools[0] if len(pools) == 1 and not pools[0].config.hosts else None
        self._every_request = next((pool for pool in pools if pool.config.from_flags), None)
        self._hosts = PoolHosts({name: pool.config.hosts for name, pool in self._pools.items()})
        self._pickers = PoolPickers({name: pool.config.endpoint_picker for name, pool in self._pools.items()})

    # --- tasks ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Scrape, write and watch for all pools until cancelled."""
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
        """Let go of everything; call it when `run` has ended."""
        self._tasks = None
        for pool in self.with_requests.values():
            await pool.close()

    def end_waiting(self) -> None:
        """Answer all requests that wait; none waits from now on."""
        for pool in self._pools.values():
            pool.runtime.admission.close()

    async def first_looks(self) -> None:
        """Wait until the index and every endpoint were looked at, and until the models' tokenizers are loaded.

        All of it has deadlines: what does not answer is not waited for.
        """
        pools = tuple(self._pools.values())
        scrapes = [pool.endpoints.first_scrapes() for pool in pools]
        await asyncio.gather(self._resources.look_at_index(), *scrapes)
        await asyncio.gather(*[pool.answers() for pool in pools])
        if self._loading:  # of declared models, and of those that the pods have told
            await asyncio.wait(self._loading, timeout=TOKENIZERS_SECONDS)

    def _start(self, pool: Pool) -> None:
        if self._tasks is not None and pool.name not in self._running:
            task = self._tasks.create_task(pool.endpoints.run(), name=f"scrape pool {pool.name}")
            self._running[pool.name] = (task,)

    def _start_quotas(self, pool: Pool) -> None:
        """Quotas are written once there is one: hundreds of pools without need no task each."""
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
            pool.apply(pool.config)
            pool.tokens.reporter.look()

    async def _refresh_folders(self) -> None:
        """Take up what has changed in folders, what could not be loaded before, and folders that are new."""
        while True:
            await asyncio.sleep(FOLDERS_EVERY_SECONDS)
            for pool in tuple(self._pools.values()) if self._resources.settings.tokenizer_folders is not None else ():
                with self._alone(pool.name):
                    if await asyncio.to_thread(pool.found_folders):
                        self._load_tokenizers(pool)
            if await self._resources.tokenizers.refresh():
                for pool in tuple(self.with_requests.values()):
                    with self._alone(pool.name):
                        pool.apply(pool.config)

    async def _check_tokens(self) -> None:
        """Compare the folders' tokens with the pods', one pod of each model after another."""
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
                if pool.runtime.picked_at > since:
                    with self._alone(pool.name):
                        pool.match_reporter.look()
                        if looks % LOOKS_BACK_EVERY == 0:
                            pool.realised_reporter.look()
                if looks % every == 0:
                    with self._alone(pool.name):
                        pool.tokens.reporter.look()
            self._end_waits()
            for pool in tuple(self._leaving.values()):
                # it may have come back while another one was closed
                if pool.is_free and self._leaving.get(pool.name) is pool:
                    with self._alone(pool.name):
                        await self._end(pool)

    def _end_waits(self) -> None:
        """Answer requests that wait in pools that have not come back in time."""
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

"""Gathers the facts of a mesh whose pools come from documents: those of all, then each pool's own. Judges nothing.

Called by `examine_mesh` with a snapshot of the documents; what is no pool's own (Redis, index, picker) is asked once.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import aiohttp

from extproc.doctor.facts import (
    EnvoyFacts,
    Expected,
    Facts,
    IndexFacts,
    MeshFacts,
    PickerFacts,
    PodFacts,
    PoolFacts,
    RedisFacts,
)
from extproc.doctor.gather import PODS_AT_A_TIME, DoctorSettings, expected_of
from extproc.doctor.gather_envoy import gather_envoy
from extproc.doctor.gather_picker import gather_indexer, gather_picker_tokens, picker_address
from extproc.doctor.gather_pods import PodQuestions
from extproc.doctor.gather_redis import gather_index, gather_redis
from extproc.doctor.gather_tokens import own_tokens
from extproc.doctor.gather_trials import Trials
from extproc.doctor.grpc_health_check import ask_health
from extproc.doctor.http_page import ask
from extproc.models.learned_models import learned_models
from extproc.models.models import ModelTable, ServedModel
from extproc.pods.endpoint import parse_served_models
from extproc.policy.mesh_policy import MeshPolicy, MeshState
from extproc.policy.pool_config import PoolConfig
from extproc.pools.pool_models import declared_models
from kvmesh.documents.documents import Snapshot
from kvmesh.documents.pools import pool_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class AllFacts:
    """Facts of the mesh, and of each pool by name."""

    mesh: Facts
    pools: Mapping[str, Facts]


async def gather_mesh(
    settings: DoctorSettings, snapshot: Snapshot, *, now: datetime, pools: Collection[str] = ()
) -> AllFacts:
    """Return the facts; `pools` names those whose pods are asked, none: all."""
    picker, seconds = settings.picker, settings.timeout_seconds
    policy = MeshPolicy(root_namespace=picker.root_namespace, settings=picker.policy_fields)
    state = await asyncio.to_thread(policy.update, snapshot, now=now)
    asked = [config for name, config in state.configs.items() if not pools or name in pools]
    redis = await gather_redis(picker.redis_url, timeout_seconds=seconds)
    connector = aiohttp.TCPConnector(limit=4 * PODS_AT_A_TIME)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=True, trust_env=False) as http:
        questions = _Questions(http, settings=settings, redis=redis)
        around = await questions.around()
        found = [await questions.of_pool(config, around) for config in asked]
        # last, so that it knows of the prompts that were just sent
        index = await gather_index(picker.redis_url, hash_seed=picker.hash_seed, timeout_seconds=seconds)
        mesh = await questions.of_mesh(state, found, around, index=index, pools=pools)
    return AllFacts(mesh=mesh, pools={each.pool.name: replace(each.facts, index=index) for each in found})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    pool: PoolFacts
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """What is there once for all pools."""

    picker: PickerFacts | None
    served: Mapping[str, int] | None  # the picker's pools; None: it was not asked, or does not say
    envoy: EnvoyFacts | None


class _Questions:
    """What is asked of one mesh after the other parts."""

    def __init__(self, http: aiohttp.ClientSession, *, settings: DoctorSettings, redis: RedisFacts) -> None:
        self._http = http
        self._settings = settings
        self._redis = redis

    async def around(self) -> _Around:
        """Ask picker and Envoy."""
        settings = self._settings
        picker, served = await self._picker(settings.picker_admin) if settings.picker_admin else (None, None)
        envoy = None
        if settings.envoy_admin:
            envoy = await gather_envoy(self._http, settings.envoy_admin, timeout_seconds=settings.timeout_seconds)
        return _Around(picker=picker, served=served, envoy=envoy)

    async def of_pool(self, config: PoolConfig, around: _Around) -> _Found:
        """Ask the pods of one pool, those that are ready, and try them."""
        settings = self._settings
        addresses = tuple(each.address for each in config.endpoints if each.ready and not each.terminating)
        learned = () if config.model else await self._learned(addresses)
        models = declared_models(replace(config, learned=learned), settings.picker.model_table.served)
        model = config.model or next((each.name for each in learned), None)
        if not models.served and model is not None:
            models = ModelTable(served=(ServedModel(name=model),))
        seed = pool_seed(settings.picker.hash_seed, config.name)
        expected = replace(
            expected_of(replace(settings.picker, kubernetes=False, policies_folder=None)),
            endpoints=addresses,
            models=models,
            hash_seed=seed,
            pool=config.name,
            failure_mode=config.failure_mode,
        )
        pods = await self._pods(expected)
        trials = None
        if settings.trial and not self._redis.problem:
            trials = await Trials(
                self._http,
                access=settings.picker.redis_url,
                expected=expected,
                picker=None,
                login=settings.login,
                timeout_seconds=settings.timeout_seconds,
                visible_within_seconds=settings.visible_within_seconds,
            ).gather(pods)
        return _Found(
            pool=PoolFacts(
                name=config.name,
                endpoints=config.endpoints,
                hash_seed=seed,
                model=model,
                policies=tuple(sorted(set(config.origins.values()))),
            ),
            facts=Facts(
                expected=expected,
                now=time.time(),
                pods=pods,
                redis=self._redis,
                index=IndexFacts(),
                trials=trials,
                picker=await self._picker_of_pool(config.name, pods, around),
                envoy=around.envoy,
            ),
        )

    async def _picker_of_pool(self, pool: str, pods: Sequence[PodFacts], around: _Around) -> PickerFacts | None:
        """Return the picker with what it makes of this pool's prompts; None where it does not serve the pool."""
        if around.picker is None or pool not in (around.served or ()):
            return None
        settings = self._settings
        tokens = await gather_picker_tokens(
            self._http,
            around.picker.url,
            pods=pods,
            timeout_seconds=settings.timeout_seconds,
            login=settings.login,
            pool=pool,
        )
        return replace(around.picker, tokens=tokens)

    async def of_mesh(
        self, state: MeshState, found: Sequence[_Found], around: _Around, *, index: IndexFacts, pools: Collection[str]
    ) -> Facts:
        """Ask those who are there once for all pools."""
        settings, seconds = self._settings, self._settings.timeout_seconds
        pods = tuple(pod for each in found for pod in each.facts.pods)
        statuses = tuple(state.statuses.values())
        refused = {f"InferencePolicy {status.source}" for status in statuses}
        return Facts(
            expected=replace(
                expected_of(replace(settings.picker, kubernetes=False, policies_folder=None)),
                endpoints=tuple(dict.fromkeys(pod.endpoint for pod in pods)),
            ),
            now=time.time(),
            pods=pods,
            redis=self._redis,
            index=index,
            indexer=(
                await gather_indexer(self._http, settings.indexer_admin, timeout_seconds=seconds, login=settings.login)
                if settings.indexer_admin
                else None
            ),
            picker=around.picker,
            envoy=around.envoy,
            mesh=MeshFacts(
                pools=tuple(each.pool for each in found),
                # a policy's own status says what is wrong with it
                problems=tuple(problem for problem in state.problems if problem.where not in refused),
                policies=statuses,
                served=_of(around.served, pools),
            ),
        )

    async def _pods(self, expected: Expected) -> tuple[PodFacts, ...]:
        own = await own_tokens(expected.models.served)
        seconds = self._settings.timeout_seconds
        questions = PodQuestions(self._http, models=expected.models, own=own, timeout_seconds=seconds)
        turn = asyncio.Semaphore(PODS_AT_A_TIME)

        async def ask_one(endpoint: str) -> PodFacts:
            async with turn:
                return await questions.gather(endpoint)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask_one(each), name=f"ask {each}") for each in expected.endpoints]
        return tuple(task.result() for task in tasks)

    async def _learned(self, addresses: Sequence[str]) -> tuple[ServedModel, ...]:
        """Return what a picker learns of the pods' models."""
        urls = [f"http://{address}/v1/models" for address in addresses]
        pages = [await ask(self._http, url, timeout_seconds=self._settings.timeout_seconds) for url in urls]
        told = [parse_served_models(page.body) if page.status == 200 else None for page in pages]
        return learned_models(told, folders=self._settings.picker.tokenizer_folders)

    async def _picker(self, url: str) -> tuple[PickerFacts, Mapping[str, int] | None]:
        """Return how the picker at this admin address stands, and its pools."""
        url, settings = url.rstrip("/"), self._settings
        seconds, login = settings.timeout_seconds, settings.login
        readiness = await ask(self._http, f"{url}/readyz", timeout_seconds=seconds, login=login)
        page = await ask(self._http, f"{url}/pools", timeout_seconds=seconds, login=login)
        content: Any = page.json() if page.status == 200 else None
        lines = content.get("pools") if isinstance(content, Mapping) else content
        if not isinstance(lines, list):
            words = page.problem or page.refusal or f"/pools answers {page.status}: is this a picker with pools?"
            return PickerFacts(url=url, problem=words), None
        said: Any = readiness.json()
        index = said.get("index_problem") if isinstance(said, Mapping) else None
        address = picker_address(url, grpc_port=settings.picker.grpc_port)
        picker = PickerFacts(
            url=url,
            ready=readiness.status == 200,
            index_problem=str(index or ""),
            grpc_address=address,
            grpc_health=await ask_health(address, timeout_seconds=seconds),
        )
        served = {str(line.get("pool")): line.get("endpoints") for line in lines if isinstance(line, Mapping)}
        return picker, {name: count for name, count in served.items() if isinstance(count, int)}


def _of(served: Mapping[str, int] | None, pools: Collection[str]) -> Mapping[str, int] | None:
    """Return what is said of these pools; of all, where all are asked."""
    return {name: count for name, count in served.items() if not pools or name in pools} if served is not None else None

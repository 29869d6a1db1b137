"""Examines a mesh whose pools come from documents: the shared parts once, then each pool."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import msgspec

from extproc.models.learned_models import learned_models
from extproc.models.models import ModelTable, ServedModel
from extproc.pages.findings import Finding
from extproc.pods.endpoint import parse_served_models
from extproc.policy.values import PoolConfig
from extproc.pools.pool_models import declared_models
from extproc.reach.mesh_policy import MeshPolicy
from kvmesh.documents.documents import Snapshot
from kvmesh.documents.pools import pool_seed
from kvmesh.pods.pod_http import MAX_MODELS_BYTES
from kvmesh.pods.pod_key import open_key
from operate.doctor.checks import OF_EACH_POOL, OF_THE_MESH, judge
from operate.doctor.examine import DoctorSettings, expected_of, try_pods
from operate.doctor.facts import Facts, IndexFacts, MeshFacts, PoolFacts
from operate.doctor.gather_admin import gather_envoy, gather_indexer, gather_pools_picker, with_picker_tokens
from operate.doctor.gather_index import gather_index, gather_redis
from operate.doctor.gather_pods import gather_pods
from operate.doctor.questions import Client, open_client


async def examine_mesh(
    settings: DoctorSettings, snapshot: Snapshot, *, now: datetime, pools: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Judge the mesh described by the documents, then each of its pools (or only `pools`, if any are given).

    The subject of a pool's finding begins with its name. Problems become findings, not exceptions.
    """
    mesh, of_pools = await _gather_mesh(settings, snapshot, now=now, pools=pools)
    findings = judge(mesh, names=OF_THE_MESH)
    for name, facts in of_pools.items():
        if facts.expected.endpoints:  # a pool without endpoints is reported by `pool-endpoints`
            findings += tuple(_of_pool(name, finding) for finding in judge(facts, names=OF_EACH_POOL))
    return findings


def _of_pool(pool: str, finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, subject=f"{pool} {finding.subject}".strip())


async def _gather_mesh(
    settings: DoctorSettings, snapshot: Snapshot, *, now: datetime, pools: Collection[str]
) -> tuple[Facts, Mapping[str, Facts]]:
    """Return the facts of the mesh, and of each pool by name; only pods of `pools` are asked (empty: all)."""
    own, seconds = settings.picker, settings.timeout_seconds
    policy = MeshPolicy(root_namespace=own.root_namespace, settings=own.policy_fields)
    state = await asyncio.to_thread(policy.update, snapshot, now=now)
    asked = [config for name, config in state.configs.items() if not pools or name in pools]
    redis = await gather_redis(own.redis_url, timeout_seconds=seconds)
    key = open_key(settings.picker.pod_access)
    async with open_client(timeout_seconds=seconds, login=settings.login, pod_key=key) as client:
        picker, served = None, None
        if settings.picker_admin:
            picker, served = await gather_pools_picker(client, settings.picker_admin, grpc_port=own.grpc_port)
        shared = Facts(
            expected=expected_of(replace(own, kubernetes=False, policies_folder=None)),
            now=time.time(),
            pods=(),
            redis=redis,
            index=IndexFacts(),
            picker=picker,
            envoy=await gather_envoy(client, settings.envoy_admin) if settings.envoy_admin else None,
        )
        found = [await _gather_pool(client, settings, config, shared, served=served or {}) for config in asked]
        # last, so that it includes the prompts just sent
        index = await gather_index(own.redis_url, hash_seed=own.hash_seed, timeout_seconds=seconds)
        indexer = await gather_indexer(client, settings.indexer_admin) if settings.indexer_admin else None
    pods = tuple(pod for _, facts in found for pod in facts.pods)
    statuses = tuple(state.statuses.values())
    refused = {f"InferencePolicy {status.source}" for status in statuses}
    mesh = replace(
        shared,
        expected=replace(shared.expected, endpoints=tuple(dict.fromkeys(pod.endpoint for pod in pods))),
        now=time.time(),
        pods=pods,
        index=index,
        indexer=indexer,
        mesh=MeshFacts(
            pools=tuple(pool for pool, _ in found),
            # problems of policies are in their status
            problems=tuple(problem for problem in state.problems if problem.where not in refused),
            policies=statuses,
            served=None if served is None else {name: served[name] for name in served if not pools or name in pools},
        ),
    )
    return mesh, {pool.name: replace(facts, index=index) for pool, facts in found}


async def _gather_pool(
    client: Client, settings: DoctorSettings, config: PoolConfig, shared: Facts, *, served: Mapping[str, int]
) -> tuple[PoolFacts, Facts]:
    """Ask a pool's ready pods, send trial prompts, and let a picker that serves the pool count their tokens."""
    addresses = tuple(each.address for each in config.endpoints if each.ready and not each.terminating)
    learned = () if config.model else await _learned(client, settings, addresses)
    own, folders = settings.picker.model_table.served, settings.picker.tokenizer_folders
    models = declared_models(replace(config, learned=learned), own, folders=folders)
    model = config.model or next((each.name for each in learned), None)
    if not models.served and model is not None:
        models = ModelTable(served=(ServedModel(name=model),))
    seed = pool_seed(settings.picker.hash_seed, config.name)
    expected = replace(
        shared.expected,
        endpoints=addresses,
        models=models,
        hash_seed=seed,
        pool=config.name,
        failure_mode=config.failure_mode,
    )
    pods = await gather_pods(client, expected)
    trials = await try_pods(client, settings, expected, pods=pods, redis=shared.redis, picker=None)
    picker = shared.picker if config.name in served else None
    if picker is not None:
        within = settings.visible_within_seconds
        picker = await with_picker_tokens(client, picker, models, within_seconds=within, pool=config.name)
    pool = PoolFacts(
        name=config.name,
        endpoints=config.endpoints,
        hash_seed=seed,
        model=model,
        policies=tuple(sorted(set(config.origins.values()))),
    )
    return pool, replace(shared, expected=expected, now=time.time(), pods=pods, trials=trials, picker=picker)


async def _learned(client: Client, settings: DoctorSettings, addresses: Sequence[str]) -> tuple[ServedModel, ...]:
    pages = [await client.ask_pod(each, "/v1/models", limit_bytes=MAX_MODELS_BYTES) for each in addresses]
    listed = [parse_served_models(page.body) if page.status == 200 else None for page in pages]
    return learned_models(listed, folders=settings.picker.tokenizer_folders)

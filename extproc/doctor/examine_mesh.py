"""Examines a mesh whose pools come from documents: what all pools share once, then each pool by itself."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import msgspec

from extproc.doctor.checks import OF_EACH_POOL, OF_THE_MESH, judge
from extproc.doctor.examine import DoctorSettings, expected_of, try_pods
from extproc.doctor.facts import Facts, IndexFacts, MeshFacts, PoolFacts
from extproc.doctor.findings import Finding
from extproc.doctor.gather_admin import gather_envoy, gather_indexer, gather_picker_tokens, gather_pools_picker
from extproc.doctor.gather_index import gather_index, gather_redis
from extproc.doctor.gather_pods import gather_pods, own_tokens
from extproc.doctor.questions import Client, open_client
from extproc.models.learned_models import learned_models
from extproc.models.models import ModelTable, ServedModel
from extproc.pods.endpoint import parse_served_models
from extproc.policy.mesh_policy import MeshPolicy
from extproc.policy.pool_config import PoolConfig
from extproc.pools.pool_models import declared_models
from kvmesh.documents.documents import Snapshot
from kvmesh.documents.pools import pool_seed
from kvmesh.pods.pod_http import MAX_MODELS_BYTES
from kvmesh.pods.pod_key import open_key


async def examine_mesh(
    settings: DoctorSettings, snapshot: Snapshot, *, now: datetime, pools: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Judge the mesh that these documents name, then each pool by itself (of `pools`, if any are named).

    A pool's findings begin with its name. Never raises for what is found.
    """
    mesh, of_pools = await _gather_mesh(settings, snapshot, now=now, pools=pools)
    findings = judge(mesh, names=OF_THE_MESH)
    for name, facts in of_pools.items():
        if facts.expected.endpoints:  # where there are none, `pool-endpoints` has said so
            findings += tuple(_of_pool(name, finding) for finding in judge(facts, names=OF_EACH_POOL))
    return findings


def _of_pool(pool: str, finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, subject=f"{pool} {finding.subject}".strip())


async def _gather_mesh(
    settings: DoctorSettings, snapshot: Snapshot, *, now: datetime, pools: Collection[str]
) -> tuple[Facts, Mapping[str, Facts]]:
    """Return the facts of the mesh, and of each pool by name; `pools` are those whose pods are asked, none: all."""
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
        # last, so that it knows of the prompts that were just sent
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
            # a policy's own status says what is wrong with it
            problems=tuple(problem for problem in state.problems if problem.where not in refused),
            policies=statuses,
            served=None if served is None else {name: served[name] for name in served if not pools or name in pools},
        ),
    )
    return mesh, {pool.name: replace(facts, index=index) for pool, facts in found}


async def _gather_pool(
    client: Client, settings: DoctorSettings, config: PoolConfig, shared: Facts, *, served: Mapping[str, int]
) -> tuple[PoolFacts, Facts]:
    """Ask the pods of one pool that are ready, try them, and have a picker that serves the pool count their tokens."""
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
    pods = await gather_pods(client, expected, await own_tokens(models.served))
    trials = await try_pods(client, settings, expected, pods=pods, redis=shared.redis, picker=None)
    picker = shared.picker if config.name in served else None
    if picker is not None:
        picker = replace(picker, tokens=await gather_picker_tokens(client, picker.url, pods=pods, pool=config.name))
    pool = PoolFacts(
        name=config.name,
        endpoints=config.endpoints,
        hash_seed=seed,
        model=model,
        policies=tuple(sorted(set(config.origins.values()))),
    )
    return pool, replace(shared, expected=expected, now=time.time(), pods=pods, trials=trials, picker=picker)


async def _learned(client: Client, settings: DoctorSettings, addresses: Sequence[str]) -> tuple[ServedModel, ...]:
    """Return what a picker learns of the pods' models."""
    pages = [await client.ask_pod(each, "/v1/models", limit_bytes=MAX_MODELS_BYTES) for each in addresses]
    listed = [parse_served_models(page.body) if page.status == 200 else None for page in pages]
    return learned_models(listed, folders=settings.picker.tokenizer_folders)

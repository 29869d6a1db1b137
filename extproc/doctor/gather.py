"""Gathers all facts, the pods side by side; every question has its deadline. Called by `examine`; judges nothing."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from extproc.doctor.facts import Expected, Facts, PodFacts
from extproc.doctor.gather_envoy import gather_envoy
from extproc.doctor.gather_picker import gather_indexer, gather_picker
from extproc.doctor.gather_pods import PodQuestions
from extproc.doctor.gather_redis import gather_index, gather_redis
from extproc.doctor.gather_tokens import own_tokens
from extproc.doctor.gather_trials import Trials
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.settings.config import PickerSettings
from kvmesh.admin.admin_login import AdminLogin

PODS_AT_A_TIME = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """What is looked at beside what the picker's settings name."""

    picker: PickerSettings
    envoy_admin: str | None = None
    picker_admin: str | None = None
    indexer_admin: str | None = None
    login: AdminLogin = field(default_factory=AdminLogin)  # shown to these two alone
    trial: bool = True  # send each pod one fresh prompt and look for it in the index
    timeout_seconds: float = 5.0  # of each question
    visible_within_seconds: float = 3.0  # a prompt that was served must be in the index by then


def expected_of(settings: PickerSettings) -> Expected:
    """Return what the picker's settings say, as far as anything is compared with it."""
    return Expected(
        endpoints=settings.endpoints,
        models=settings.model_table,
        hash_seed=settings.hash_seed,
        steering=settings.steering,
        grpc_port=settings.grpc_port,
        index_timeout_seconds=settings.index_timeout_seconds,
    )


async def gather(settings: DoctorSettings, *, tokenizers: Mapping[str, ModelTokenizer] | None = None) -> Facts:
    """Return the facts. `tokenizers` are those that are loaded already, by model."""
    expected, seconds = expected_of(settings.picker), settings.timeout_seconds
    own = await own_tokens(expected.models.served, loaded=tokenizers)
    connector = aiohttp.TCPConnector(limit=4 * PODS_AT_A_TIME)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=True, trust_env=False) as http:
        questions = PodQuestions(http, models=expected.models, own=own, timeout_seconds=seconds)
        turn = asyncio.Semaphore(PODS_AT_A_TIME)
        async with asyncio.TaskGroup() as group:
            of_pods = [
                group.create_task(_in_turn(turn, questions, endpoint), name=f"ask {endpoint}")
                for endpoint in expected.endpoints
            ]
            of_redis = group.create_task(
                gather_redis(settings.picker.redis_url, timeout_seconds=seconds), name="ask redis"
            )
        pods, redis = tuple([task.result() for task in of_pods]), of_redis.result()
        picker = (
            await gather_picker(
                http,
                settings.picker_admin,
                expected=expected,
                pods=pods,
                timeout_seconds=seconds,
                login=settings.login,
            )
            if settings.picker_admin
            else None
        )
        trials = None
        if settings.trial and not redis.problem:
            trials = await Trials(
                http,
                access=settings.picker.redis_url,
                expected=expected,
                picker=picker,
                login=settings.login,
                timeout_seconds=seconds,
                visible_within_seconds=settings.visible_within_seconds,
            ).gather(pods)
        return Facts(
            expected=expected,
            now=time.time(),
            pods=pods,
            redis=redis,
            # last, so that it knows of the prompts that were just sent
            index=await gather_index(settings.picker.redis_url, hash_seed=expected.hash_seed, timeout_seconds=seconds),
            trials=trials,
            indexer=(
                await gather_indexer(http, settings.indexer_admin, timeout_seconds=seconds, login=settings.login)
                if settings.indexer_admin
                else None
            ),
            picker=picker,
            envoy=(
                await gather_envoy(http, settings.envoy_admin, timeout_seconds=seconds)
                if settings.envoy_admin
                else None
            ),
        )


async def _in_turn(turn: asyncio.Semaphore, questions: PodQuestions, endpoint: str) -> PodFacts:
    async with turn:
        return await questions.gather(endpoint)

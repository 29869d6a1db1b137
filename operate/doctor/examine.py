"""Examines the parts named by a picker's settings: `examine` for the command, `run_startup_checks` for the picker.

First all facts are gathered (pods concurrently, each request with a deadline), then they are judged.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from extproc.pages.findings import Finding, Severity
from extproc.settings.config import PickerSettings
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.pods.pod_key import open_key
from operate.doctor.checks import judge
from operate.doctor.facts import Expected, Facts, PickerFacts, PodFacts, RedisFacts, TrialFacts
from operate.doctor.gather_admin import gather_envoy, gather_indexer, gather_picker, with_picker_tokens
from operate.doctor.gather_index import Trials, gather_index, gather_redis
from operate.doctor.gather_pods import gather_pods
from operate.doctor.questions import Client, open_client

log = logging.getLogger(__name__)

STARTUP_LIMIT_SECONDS = 60.0  # for all checks together
STARTUP_PAUSE_SECONDS = 10.0  # lets an indexer that starts at the same time finish its replay
LEVELS = {Severity.ERROR: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.UNCHECKED: logging.WARNING}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """The picker's settings, and what else to check."""

    picker: PickerSettings
    envoy_admin: str | None = None
    picker_admin: str | None = None
    indexer_admin: str | None = None
    login: AdminLogin = field(default_factory=AdminLogin)  # sent only to picker and indexer
    trial: bool = True  # send each pod one fresh prompt and look for it in the index
    timeout_seconds: float = 5.0  # per request
    visible_within_seconds: float = 3.0  # deadline for the served prompt to appear in the index


def expected_of(settings: PickerSettings) -> Expected:
    """Return the picker's settings that the checks compare with."""
    return Expected(
        endpoints=settings.endpoints,
        models=settings.model_table,
        hash_seed=settings.hash_seed,
        steering=settings.steering,
        grpc_port=settings.grpc_port,
        index_timeout_seconds=settings.index_timeout_seconds,
    )


async def examine(settings: DoctorSettings) -> tuple[Finding, ...]:
    """Gather and judge; problems become findings, not exceptions."""
    return judge(await gather(settings))


async def run_startup_checks(
    settings: PickerSettings, *, after_seconds: float = STARTUP_PAUSE_SECONDS
) -> Sequence[Finding]:
    """Check the picker's dependencies once; log and return the findings that are not ok.

    Runs as a background task for which readiness must not wait. Unlike the command it sends no prompts to pods. Raises
    only CancelledError.
    """
    await asyncio.sleep(after_seconds)
    try:
        async with asyncio.timeout(STARTUP_LIMIT_SECONDS):
            found = await examine(DoctorSettings(picker=settings, trial=False))
    except TimeoutError:
        log.warning("the start-up checks were given up after %g s; run `kvmesh doctor`", STARTUP_LIMIT_SECONDS)
        return ()
    except Exception:  # a bug in the doctor must not end the picker
        log.exception("the start-up checks failed; the picker goes on without them")
        return ()
    wrong = [finding for finding in found if finding.severity is not Severity.OK]
    for finding in wrong:
        log.log(
            LEVELS[finding.severity],
            "%s: %s; to do: %s",
            finding.subject,
            finding.seen,
            finding.fix,
            extra={"check": finding.check},
        )
    if not wrong:
        log.info("start-up checks: %d checks, nothing wrong", len(found))
    return wrong


async def gather(settings: DoctorSettings) -> Facts:
    """Return all facts that the settings ask for."""
    expected, seconds = expected_of(settings.picker), settings.timeout_seconds
    access = settings.picker.redis_url
    key = open_key(settings.picker.pod_access)
    async with open_client(timeout_seconds=seconds, login=settings.login, pod_key=key) as client:
        async with asyncio.TaskGroup() as group:
            of_pods = group.create_task(gather_pods(client, expected), name="ask the pods")
            of_redis = group.create_task(gather_redis(access, timeout_seconds=seconds), name="ask redis")
        pods, redis = of_pods.result(), of_redis.result()
        picker = None
        if settings.picker_admin:
            picker = await gather_picker(client, settings.picker_admin, grpc_port=expected.grpc_port)
        trials = await try_pods(client, settings, expected, pods=pods, redis=redis, picker=picker)
        if picker is not None and not picker.problem:
            within = settings.visible_within_seconds
            picker = await with_picker_tokens(client, picker, expected.models, within_seconds=within)
        return Facts(
            expected=expected,
            now=time.time(),
            pods=pods,
            redis=redis,
            # last, so that it includes the prompts just sent
            index=await gather_index(access, hash_seed=expected.hash_seed, timeout_seconds=seconds),
            trials=trials,
            indexer=await gather_indexer(client, settings.indexer_admin) if settings.indexer_admin else None,
            picker=picker,
            envoy=await gather_envoy(client, settings.envoy_admin) if settings.envoy_admin else None,
        )


async def try_pods(
    client: Client,
    settings: DoctorSettings,
    expected: Expected,
    *,
    pods: Sequence[PodFacts],
    redis: RedisFacts,
    picker: PickerFacts | None,
) -> tuple[TrialFacts, ...] | None:
    """Send each pod a fresh prompt and look for it in the index. None without --trial or Redis."""
    if not settings.trial or redis.problem:
        return None
    trials = Trials(
        client=client,
        access=settings.picker.redis_url,
        expected=expected,
        picker=picker,
        visible_within_seconds=settings.visible_within_seconds,
    )
    return await trials.gather(pods)

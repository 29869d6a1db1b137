"""Examines what a picker's settings name: `examine` for the command, `run_startup_checks` for a picker that starts.

All facts are gathered first, the pods side by side and each question with its deadline; then they are judged.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from extproc.doctor.checks import judge
from extproc.doctor.facts import Expected, Facts, PickerFacts, PodFacts, RedisFacts, TrialFacts
from extproc.doctor.findings import Finding, Severity
from extproc.doctor.gather_admin import gather_envoy, gather_indexer, gather_picker
from extproc.doctor.gather_index import Trials, gather_index, gather_redis
from extproc.doctor.gather_pods import gather_pods, own_tokens
from extproc.doctor.questions import Client, open_client
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.settings.config import PickerSettings
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.pods.pod_key import open_key

log = logging.getLogger(__name__)

STARTUP_LIMIT_SECONDS = 60.0  # of all checks together
STARTUP_PAUSE_SECONDS = 10.0  # what starts at the same time, as an indexer, is up and has replayed by then
LEVELS = {Severity.ERROR: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.UNCHECKED: logging.WARNING}


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


async def examine(
    settings: DoctorSettings, *, tokenizers: Mapping[str, ModelTokenizer] | None = None
) -> tuple[Finding, ...]:
    """Gather, then judge. `tokenizers` are those that are loaded already, by model. Never raises for what is found."""
    return judge(await gather(settings, tokenizers=tokenizers))


async def run_startup_checks(
    settings: PickerSettings,
    *,
    tokenizers: Mapping[str, ModelTokenizer] | None = None,
    after_seconds: float = STARTUP_PAUSE_SECONDS,
) -> Sequence[Finding]:
    """Check once what the picker depends on, log what is wrong, and return it; ok findings are left out.

    For a task of its own beside the requests: readiness must not wait for it, and it ends by itself. It sends no
    prompt to any pod, unlike the command. Raises nothing but CancelledError.
    """
    await asyncio.sleep(after_seconds)
    try:
        async with asyncio.timeout(STARTUP_LIMIT_SECONDS):
            found = await examine(DoctorSettings(picker=settings, trial=False), tokenizers=tokenizers)
    except TimeoutError:
        log.warning("the start-up checks were given up after %g s; run `kvmesh doctor`", STARTUP_LIMIT_SECONDS)
        return ()
    except Exception:  # a defect of the doctor must not end the picker
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


async def gather(settings: DoctorSettings, *, tokenizers: Mapping[str, ModelTokenizer] | None = None) -> Facts:
    """Return the facts. `tokenizers` are those that are loaded already, by model."""
    expected, seconds = expected_of(settings.picker), settings.timeout_seconds
    access = settings.picker.redis_url
    own = await own_tokens(expected.models.served, loaded=tokenizers)
    key = open_key(settings.picker.pod_access)
    async with open_client(timeout_seconds=seconds, login=settings.login, pod_key=key) as client:
        async with asyncio.TaskGroup() as group:
            of_pods = group.create_task(gather_pods(client, expected, own), name="ask the pods")
            of_redis = group.create_task(gather_redis(access, timeout_seconds=seconds), name="ask redis")
        pods, redis = of_pods.result(), of_redis.result()
        picker = None
        if settings.picker_admin:
            picker = await gather_picker(client, settings.picker_admin, expected=expected, pods=pods)
        trials = await try_pods(client, settings, expected, pods=pods, redis=redis, picker=picker)
        return Facts(
            expected=expected,
            now=time.time(),
            pods=pods,
            redis=redis,
            # last, so that it knows of the prompts that were just sent
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
    """Send each pod a fresh prompt and look for it in the index; None where that is not wanted or not possible."""
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

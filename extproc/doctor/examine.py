"""The doctor's ways in: `examine` and `examine_mesh` for the command, `run_startup_checks` for a picker that starts."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import msgspec

from extproc.doctor.checks import OF_EACH_POOL, OF_THE_MESH, judge
from extproc.doctor.findings import Finding, Severity
from extproc.doctor.gather import DoctorSettings, gather
from extproc.doctor.gather_mesh import gather_mesh
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.settings.config import PickerSettings
from kvmesh.documents.documents import Snapshot

log = logging.getLogger(__name__)

STARTUP_LIMIT_SECONDS = 60.0  # of all checks together
STARTUP_PAUSE_SECONDS = 10.0  # what starts at the same time, as an indexer, is up and has replayed by then
LEVELS = {Severity.ERROR: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.UNCHECKED: logging.WARNING}


async def examine(
    settings: DoctorSettings, *, tokenizers: Mapping[str, ModelTokenizer] | None = None
) -> tuple[Finding, ...]:
    """Gather, then judge. `tokenizers` are those that are loaded already, by model. Never raises for what is found."""
    return judge(await gather(settings, tokenizers=tokenizers))


async def examine_mesh(
    settings: DoctorSettings, snapshot: Snapshot, *, now: datetime, pools: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Judge the mesh that these documents name, then each pool by itself (of `pools`, if any are named).

    A pool's findings begin with its name. Never raises for what is found.
    """
    found = await gather_mesh(settings, snapshot, now=now, pools=pools)
    findings = judge(found.mesh, names=OF_THE_MESH)
    for name, facts in found.pools.items():
        if facts.expected.endpoints:  # where there are none, `pool-endpoints` has said so
            findings += tuple(_of_pool(name, finding) for finding in judge(facts, names=OF_EACH_POOL))
    return findings


def _of_pool(pool: str, finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, subject=f"{pool} {finding.subject}".strip())


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

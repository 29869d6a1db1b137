"""The doctor's two ways in: `examine` for the command, `run_startup_checks` for a picker that has just started."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from extproc.adapters.tokenizer import ModelTokenizer
from extproc.config import PickerSettings
from extproc.doctor.checks import judge
from extproc.doctor.findings import Finding, Severity
from extproc.doctor.gather import DoctorSettings, gather

log = logging.getLogger(__name__)

STARTUP_LIMIT_SECONDS = 60.0  # of all checks together
STARTUP_PAUSE_SECONDS = 10.0  # what starts at the same time, as an indexer, is up and has replayed by then
LEVELS = {Severity.ERROR: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.UNCHECKED: logging.WARNING}


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

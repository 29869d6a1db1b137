"""`kvmesh up --chaos`: kills a simulated pod now and then, so that failover is seen. The supervisor starts it again."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress

from extproc.local.processes import Supervisor

VARIATION = 0.5  # of the time between two kills


async def kill_now_and_then(supervisor: Supervisor, names: Sequence[str], *, every_seconds: float) -> None:
    """Kill one of them again and again, until cancelled; never one while another is away."""
    while True:
        await asyncio.sleep(every_seconds * random.uniform(1 - VARIATION, 1 + VARIATION))  # noqa: S311
        running = supervisor.running
        if all(name in running for name in names):
            with suppress(ProcessLookupError):  # somebody else has killed it just now
                os.kill(running[random.choice(names)], signal.SIGKILL)  # noqa: S311

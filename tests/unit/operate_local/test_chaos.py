"""Kills of pods for show, which never end what shows it."""

import asyncio
import subprocess
import sys
from typing import cast

import pytest

from operate.local.processes import Supervisor, kill_now_and_then

MANY_ROUNDS = 5


class EndedUnseen:
    """A supervisor that has not yet seen that its pod has ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.asked = 0
        self.asked_often = asyncio.Event()

    @property
    def running(self) -> dict[str, int]:
        self.asked += 1
        if self.asked >= MANY_ROUNDS:
            self.asked_often.set()
        return {"pod-0": self._pid}


async def test_a_pod_that_somebody_else_has_killed_just_now_is_left_alone() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    supervisor = EndedUnseen(ended.pid)
    killing = asyncio.create_task(kill_now_and_then(cast("Supervisor", supervisor), ["pod-0"], every_seconds=0.001))
    seen = asyncio.create_task(supervisor.asked_often.wait())
    await asyncio.wait({killing, seen}, return_when=asyncio.FIRST_COMPLETED)
    assert not killing.done()
    killing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killing

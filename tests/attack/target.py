"""Runs one attack as a process of its own: `python -m tests.attack.target NAME ADDRESSES`.

It says "begun" when the attack begins, which may be when an indexer has come to listen to it. It goes on until SIGTERM,
and says then how much it has done: an attack that did nothing proves nothing.
"""

import asyncio
import contextlib
import importlib
import json
import signal
import sys
from dataclasses import dataclass
from typing import Any

MOST_SECONDS = 60.0  # an attack whose test was killed ends by itself


@dataclass(kw_only=True)
class Target:
    """What is attacked: addresses as ip:port, all of this machine."""

    gateway: str
    picker: str  # its gRPC port
    hostile_pod: str  # where the attack may be a pod: one that picker and indexer look for
    pods: list[str]  # the innocent ones
    done: int = 0  # requests, answers, batches: what the attack counts

    def begin(self) -> None:
        """Say that the attack begins now."""
        print("begun", flush=True)

    def gateway_address(self) -> tuple[str, int]:
        """Return host and port, as sockets want them."""
        return _address(self.gateway)

    def picker_address(self) -> tuple[str, int]:
        """Return host and port, as sockets want them."""
        return _address(self.picker)

    def hostile_address(self) -> tuple[str, int]:
        """Return host and port, as sockets want them."""
        return _address(self.hostile_pod)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def run(attack: Any, target: Target) -> None:
    """Attack until SIGTERM."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError, TimeoutError):
        async with asyncio.timeout(MOST_SECONDS):
            await attack(target)
            await asyncio.Event().wait()  # what the attack has left behind stays until the end
    print(target.done, flush=True)


if __name__ == "__main__":
    module = importlib.import_module(f"tests.attack.programs.{sys.argv[1]}")
    asyncio.run(run(module.attack, Target(**json.loads(sys.argv[2]))))

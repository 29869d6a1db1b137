"""What holds for every test: a limit for each, no handlers of gRPC's in forked children, logging as it was before.

And no limit to the time of one of hypothesis' examples: how busy the machine is makes no test fail.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from operate.local import ports

# Read when gRPC is loaded, so here. Tests fork from a process that gRPC's threads work in, and its handlers for that
# were seen to crash the child before it became another program, and to close the parent's connections.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Workers that start servers at the same time must not pick the same port for them, nor one of several in a row.
if "PYTEST_XDIST_WORKER" in os.environ:
    worker, workers = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    # rows from all of the range: some servers need a low one
    own_ports = [port for port in ports.pickable_ports() if port // 64 % workers == worker]
    ports.pickable_ports = lambda: own_ports

pytest_plugins = ["tests.hang_guard"]
UNIT = Path(__file__).with_name("unit")


def pytest_configure(config: pytest.Config) -> None:
    """Run unit tests alone in random order and with the seed's random numbers: servers are shared in a given order."""
    if not config.pluginmanager.hasplugin("randomly"):
        return
    places = [Path(config.invocation_params.dir, arg.partition("::")[0]) for arg in config.args]
    is_random = all(place.is_relative_to(UNIT) for place in places)
    config.option.randomly_reorganize &= is_random
    config.option.randomly_reset_seed &= is_random


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Undo what a command that was run in this process has set up: it would meet whichever test comes next."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)

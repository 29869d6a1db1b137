"""What a picker loads before its first pick: a mesh waits for it after every crash."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from operate.cli import ROLES

LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"
PICKER = """
import extproc.service
from operate.cli import build

async def serve(*_, **__): ...

extproc.service.serve = serve
flags = "--endpoints 10.0.0.1:8000 --host 0.0.0.0 --grpc-port 9002 --drain-seconds 0.5 --steering override-host"
build(["extproc"])(["extproc", *flags.split(), "--admin-token-file", "/nowhere"], standalone_mode=False)
"""
# each takes from 10 to 100 ms
HEAVY = frozenset(
    {
        *("grpc", "httpx2", "lightkube", "numpy", "opentelemetry"),
        *("prometheus_client", "redis", "rich", "transformers", "torch", "yaml", "zmq"),
        # of ours: what only other commands, or pools that are followed need
        *("extproc.reach.mesh_policy", "extproc.pools.mesh", "extproc.ledger.write_records"),
        *("kv_indexer", "kvmesh.documents.sources", "podsim"),
    }
)


@pytest.fixture(scope="module")
def loaded() -> frozenset[str]:
    """The modules of a process that is about to serve a static pool."""
    services = {"KVMESH_PICKER_SERVICE_HOST": "10.0.0.7", "KVMESH_PICKER_PORT": "tcp://10.0.0.7:9002"}  # of Kubernetes
    command = (sys.executable, "-c", PICKER + LOADED)
    answer = subprocess.run(command, env=os.environ | services, capture_output=True, check=True, timeout=60)
    return frozenset(json.loads(answer.stdout))


def test_a_picker_loads_nothing_of_other_commands(loaded: frozenset[str]) -> None:
    assert loaded & HEAVY == frozenset()
    assert {"extproc.pick", "extproc.pages.admin_port", "extproc.ext_proc.grpc_server"} <= loaded


def test_roles_are_found_where_their_entry_points_say() -> None:
    entries = {entry.name: entry.value for entry in entry_points(group="kvmesh.commands")}
    assert {name: f"{module}:app" for name, module in ROLES.items()} == {name: entries[name] for name in ROLES}

"""What a picker loads before its first pick: a mesh waits for it after every crash."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from extproc.cli import ROLES

LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"
PICKER = """
import extproc.service
from extproc.cli import build

async def serve(*_, **__): ...

extproc.service.serve = serve
flags = "--endpoints 10.0.0.1:8000 --host 0.0.0.0 --grpc-port 9002 --drain-seconds 0.5 --steering override-host"
build(["extproc"])(["extproc", *flags.split(), "--admin-token-file", "/nowhere"], standalone_mode=False)
"""
# each takes from 10 to 100 ms
HEAVY = frozenset(
    {
        *("aiohttp", "email", "grpc", "httpx2", "importlib.metadata", "lightkube", "numpy"),
        *("opentelemetry", "pydantic"),
        *("prometheus_client", "redis", "rich", "transformers", "torch", "urllib.request", "yaml", "zmq"),
        # of ours: what only pages, other commands, or pools that are followed need
        *("extproc.doctor", "extproc.install", "extproc.pages.admin_http", "extproc.pages.admin_site"),
        *("extproc.policy.mesh_policy", "extproc.pools.mesh", "extproc.records.write_records"),
        *("kv_indexer", "kvmesh.admin.admin_gate", "kvmesh.documents.sources", "podsim"),
    }
)


@pytest.fixture(scope="module")
def loaded() -> frozenset[str]:
    """The modules of a process that is about to serve a static pool."""
    services = {"KVMESH_PICKER_SERVICE_HOST": "10.0.0.7", "KVMESH_PICKER_PORT": "tcp://10.0.0.7:9002"}  # of Kubernetes
    command = (sys.executable, "-c", PICKER + LOADED)
    # a command with --config, run in this process by another test, leaves the variable behind for its children
    usual = {name: value for name, value in os.environ.items() if not name.startswith("KVMESH_")}
    answer = subprocess.run(command, env=usual | services, capture_output=True, check=True, timeout=60)
    return frozenset(json.loads(answer.stdout))


def test_a_picker_serves_before_it_loads_what_no_pick_needs(loaded: frozenset[str]) -> None:
    assert loaded & HEAVY == frozenset()
    assert {"extproc.pick", "extproc.pages.admin_port", "extproc.ext_proc.grpc_server"} <= loaded


def test_roles_are_found_where_their_entry_points_say() -> None:
    entries = {entry.name: entry.value for entry in entry_points(group="kvmesh.commands")}
    assert {name: f"{module}:app" for name, module in ROLES.items()} == {name: entries[name] for name in ROLES}

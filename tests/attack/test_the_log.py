"""How much of the log a pod or a peer can fill. Runs last: a pod that contradicts itself is asked ever less often."""

from pathlib import Path

import pytest

from tests.attack.mesh import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")

MOST_LOG_BYTES = 20_000


@pytest.mark.parametrize("program", ["broken_peers", "unreadable_batches"])
async def test_nobody_fills_the_log(mesh: Mesh, program: str) -> None:
    before = _log_bytes(mesh)
    await mesh.survives(program)
    grown = {name: size - before[name] for name, size in _log_bytes(mesh).items()}
    print(f"{program}: bytes of log {grown}")
    assert all(size < MOST_LOG_BYTES for size in grown.values()), grown


def _log_bytes(mesh: Mesh) -> dict[str, int]:
    """Return how much picker and indexer have written; `kvmesh up` keeps their logs beside Envoy's configuration."""
    words = Path(f"/proc/{mesh.stack.ready['pids']['envoy']}/cmdline").read_bytes().split(b"\0")
    folder = Path(words[words.index(b"-c") + 1].decode()).parent
    return {name: (folder / f"{name}.log").stat().st_size for name in ("extproc", "indexer")}

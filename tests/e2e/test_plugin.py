"""A scorer and a filter of another package, installed as a wheel: effective, and shown by explain and by /state."""

import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.e2e.stack import running_stack, simulated_pods

PACKAGE = Path(__file__).parents[1] / "plugin"
POLICY = "scoring: {plugins: [{name: first-address, weight: 100}, {name: not-there, weight: 1}]}\n"


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=120)


async def test_an_installed_plugin_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(PACKAGE))
    (wheel,) = tmp_path.glob("*.whl")
    pip("install", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    settings = f"policy: {tmp_path / 'policy.yaml'}\n"
    async with AsyncExitStack() as exits:
        drained, first, *others = sorted(await exits.enter_async_context(simulated_pods(3)))
        monkeypatch.setenv("DRAINED_PORTS", drained.rpartition(":")[2])
        starting = running_stack(tmp_path, "--model", "tiny", settings=settings, endpoints=[drained, first, *others])
        stack = await exits.enter_async_context(starting)
        answers = [await stack.complete(f"prompt {number} " * 50) for number in range(6)]
        assert {answer.upstream for answer in answers} == {first}
        decision = (await stack.state())["decisions"][0]
        missing = await stack.metric("kvmesh_degraded_decisions_total")
        explained = await stack.explain({"model": "tiny", "prompt": "another"})
    assert (decision["degraded"], missing) == (["plugin-not-there"], len(answers))
    assert explained["weights"]["first-address"] == 100
    scores = {candidate["endpoint"]: candidate["scores"]["first-address"] for candidate in explained["candidates"]}
    assert scores == {first: 1.0} | dict.fromkeys(others, 0.0)
    rejected = {"endpoint": drained, "filter": "no-drained-port: its port is drained"}
    assert explained["rejected"] == [rejected]

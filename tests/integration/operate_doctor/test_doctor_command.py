"""`kvmesh doctor` as a user types it: lines or JSON, and the exit code that CI goes by."""

import asyncio
import json
from pathlib import Path

from typer.testing import CliRunner, Result

from extproc.errors import ConfigError
from operate.doctor.commands import app
from podsim.model_folder import TINY_MODEL
from tests.integration.doctor_mesh import HEALTHY, SEED, Tampered, indexer, pods, two_ports
from tests.integration.envoy_process import HOST
from tests.integration.kv_redis import RedisServer


async def doctor(redis_url: str, addresses: list[str], *further: str) -> Result:
    arguments = [
        *("--endpoints", ",".join(addresses), "--redis", redis_url, "--hash-seed", SEED),
        *("--model", "tiny", "--tokenizer", str(TINY_MODEL), "--index-timeout-ms", "5000"),
        *("--timeout-ms", "10000"),
    ]
    # in a thread, because it runs a loop of its own beside that of the pods
    return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *further])


async def test_a_healthy_mesh_exits_0_and_says_so_line_by_line(redis_server: RedisServer) -> None:
    async with pods(HEALTHY) as addresses, indexer(redis_server.url, addresses):
        result = await doctor(redis_server.url, addresses)

    lines = result.output.splitlines()
    assert result.exit_code == 0, result.output
    assert lines[-1] == f"{len(lines) - 1} checks fine"


async def test_an_error_exits_1_and_json_has_every_finding(redis_server: RedisServer) -> None:
    nobody = f"{HOST}:{two_ports()[0]}"
    result = await doctor(redis_server.url, [nobody], "-o", "json")
    findings = json.loads(result.stdout)

    assert result.exit_code == 1
    assert {"check", "severity", "subject", "seen", "fix"} == set(findings[0])
    assert [(finding["check"], finding["subject"]) for finding in findings if finding["severity"] == "error"] == [
        ("pods-answer", nobody),
        ("index-follows", "index"),
    ]


async def test_what_could_not_be_checked_exits_2(redis_server: RedisServer) -> None:
    async with (
        pods(Tampered(pages={"/version": 404})) as addresses,
        indexer(redis_server.url, addresses),
    ):
        result = await doctor(redis_server.url, addresses, "--no-trial")

    assert result.exit_code == 2, result.output


async def test_a_mistake_in_the_settings_is_wrong_usage_and_named(redis_server: RedisServer, tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text("models: {served: [{name: tiny, tokens: magic}]}\n")
    result = await doctor(redis_server.url, [f"{HOST}:1"], "--policy", str(models))

    assert isinstance(result.exception, ConfigError)
    assert "models.served[0].tokens" in str(result.exception)

"""Planted between pods and picker: seeds, models, indexers, Redis, the running picker. Real servers throughout."""

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from extproc.pages.findings import Severity
from kvmesh.blocks.source import NOT_FOLLOWED, IndexStatus
from kvmesh.index.redis_reader import PrefixIndexReader
from operate.doctor.examine import DoctorSettings, run_startup_checks
from tests.integration.doctor_mesh import (
    DEADLINE_SECONDS,
    FOLLOWED,
    HEALTHY,
    SEED,
    findings,
    indexer,
    only,
    picker,
    picker_settings,
    pods,
    two_ports,
)
from tests.integration.envoy_process import HOST
from tests.integration.kv_indexer_processes import indexer_process
from tests.integration.kv_redis import RedisServer

DEFAULT_SEED = "kvmesh"  # of `kvmesh indexer`


WITHOUT_INDEXER = [
    ("index-follows", Severity.ERROR, "index"),
    ("events-flow", Severity.UNCHECKED, "index"),
    ("same-keys", Severity.UNCHECKED, "index"),
]


async def test_no_indexer_is_found(redis_server: RedisServer) -> None:
    async with pods(HEALTHY) as addresses:
        found = await findings(picker_settings(redis_server.url, addresses), visible_within_seconds=0.1)

    assert [(each.check, each.severity, each.subject) for each in found] == WITHOUT_INDEXER
    assert found[0].seen == "no indexer is alive: the index stands still"
    assert "kvmesh indexer" in found[0].fix


async def test_a_stopped_indexer_is_one_error_whatever_it_has_left_in_redis(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with pods(HEALTHY, HEALTHY) as addresses:
        with indexer_process(redis_server, tmp_path, name="a", endpoints=addresses) as process:
            await until_status(
                redis_server.url,
                lambda status: {each.endpoint for each in status.sources if each.state in FOLLOWED} >= set(addresses),
            )
            settings = picker_settings(redis_server.url, addresses, hash_seed=DEFAULT_SEED)
            assert await findings(settings) == []
            process.send(signal.SIGSTOP)
            status = await until_status(redis_server.url, lambda status: not status.indexer_alive)
            found = await findings(settings, visible_within_seconds=0.1)

    assert [each.reason for each in status.sources] == [NOT_FOLLOWED, NOT_FOLLOWED]
    assert [(each.check, each.severity, each.subject) for each in found] == WITHOUT_INDEXER


async def until_status(redis_url: str, right: Callable[[IndexStatus], bool]) -> IndexStatus:
    """What the index says of itself once it is `right`."""
    reader = PrefixIndexReader(url=redis_url, hash_seed=DEFAULT_SEED)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not right(status := await reader.status()):
                await asyncio.sleep(0.02)
            return status
    finally:
        await reader.close()


async def test_a_pod_that_no_indexer_follows_is_found(redis_server: RedisServer) -> None:
    async with pods(HEALTHY, HEALTHY) as addresses, indexer(redis_server.url, addresses[:1]):
        found = await findings(picker_settings(redis_server.url, addresses), visible_within_seconds=0.1)

    assert [(each.check, each.severity, each.subject) for each in found] == [
        ("index-follows", Severity.ERROR, addresses[1]),
        ("events-flow", Severity.UNCHECKED, addresses[1]),
        ("same-keys", Severity.UNCHECKED, addresses[1]),
    ]
    assert "the indexer's --endpoints" in found[0].fix


@pytest.mark.parametrize("theirs", ["kvmesh", "nobody-guesses-this"])
async def test_an_indexer_with_another_hash_seed_is_found(theirs: str, redis_server: RedisServer) -> None:
    async with pods(HEALTHY) as addresses, indexer(redis_server.url, addresses, hash_seed=theirs):
        found = await findings(picker_settings(redis_server.url, addresses), visible_within_seconds=1.0)

    finding = only(found, "same-keys")
    assert (finding.severity, finding.subject) == (Severity.ERROR, addresses[0])
    assert "--hash-seed" in finding.fix
    assert ("hash seed 'kvmesh'" in finding.seen) == (theirs == "kvmesh")


async def test_an_indexer_with_another_model_is_found(redis_server: RedisServer) -> None:
    async with pods(HEALTHY) as addresses, indexer(redis_server.url, addresses, model="tinny"):
        found = await findings(picker_settings(redis_server.url, addresses), visible_within_seconds=1.0)

    finding = only(found, "same-keys")
    assert (finding.severity, finding.subject) == (Severity.ERROR, addresses[0])
    assert "--model tiny" in finding.fix


@pytest.mark.parametrize(
    ("options", "check", "severity", "fix"),
    [
        (
            ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"),
            *("redis-memory", Severity.ERROR, "CONFIG SET maxmemory-policy noeviction"),
        ),
        (("--maxmemory-policy", "volatile-ttl"), "redis-memory", Severity.WARNING, "noeviction"),
        (("--maxmemory", "850kb"), "redis-memory", Severity.WARNING, "raise maxmemory"),
        (("--appendonly", "yes"), "redis-persistence", Severity.WARNING, "CONFIG SET appendonly no"),
    ],
)
async def test_what_redis_has_wrong_is_found(
    options: tuple[str, ...], check: str, severity: Severity, fix: str, tmp_path: Path
) -> None:
    redis = RedisServer(tmp_path, *options)
    redis.start()
    try:
        async with pods(HEALTHY) as addresses:
            found = await findings(picker_settings(redis.url, addresses), trial=False)
    finally:
        redis.kill()

    of_redis = [finding for finding in found if finding.check.startswith("redis-")]
    finding = only(of_redis, check)
    assert finding.severity is severity
    assert fix in finding.fix


async def test_a_redis_that_is_not_there_is_one_finding(redis_server: RedisServer) -> None:
    redis_server.kill()
    async with pods(HEALTHY) as addresses:
        found = await findings(picker_settings(redis_server.url, addresses), timeout_seconds=2.0)

    finding = only(found, "redis-answers")
    assert (finding.severity, finding.subject) == (Severity.ERROR, redis_server.url)
    assert "--redis" in finding.fix


async def test_a_redis_slower_than_a_pick_waits_is_found(redis_server: RedisServer) -> None:
    async with pods(HEALTHY) as addresses:
        settings = replace(picker_settings(redis_server.url, addresses), index_timeout_seconds=1e-6)
        found = await findings(settings, trial=False)

    [finding] = [each for each in found if each.check == "redis-latency"]
    assert finding.severity is Severity.ERROR
    assert "--index-timeout-ms" in finding.fix


async def test_a_running_picker_with_other_settings_is_found(redis_server: RedisServer) -> None:
    grpc_port, admin_port = two_ports()
    async with pods(HEALTHY, HEALTHY) as addresses, indexer(redis_server.url, addresses):
        running = picker_settings(
            redis_server.url,
            addresses[:1],
            hash_seed="another",
            grpc_port=grpc_port,
            admin_port=admin_port,
        )
        async with picker(running) as url:
            meant = picker_settings(redis_server.url, addresses, grpc_port=two_ports()[0])
            found = await findings(meant, picker_admin=url)

    # a picker that has just started may not have compared tokens yet
    by_check = {finding.check: finding for finding in found if finding.check != "picker-tokens"}
    assert list(by_check) == ["same-keys", "picker-answers", "picker-endpoints"]
    assert {finding.severity for finding in by_check.values()} == {Severity.ERROR}
    assert f"--hash-seed {SEED}" in by_check["same-keys"].fix
    assert "UNAVAILABLE" in by_check["picker-answers"].seen
    assert addresses[1] in by_check["picker-endpoints"].seen


async def test_a_picker_and_an_indexer_that_do_not_answer_are_not_checked(redis_server: RedisServer) -> None:
    nobody = f"http://{HOST}:{two_ports()[0]}"
    async with pods(HEALTHY) as addresses, indexer(redis_server.url, addresses):
        found = await findings(
            picker_settings(redis_server.url, addresses),
            picker_admin=nobody,
            indexer_admin=nobody,
            envoy_admin=nobody,
        )

    assert [(finding.check, finding.severity) for finding in found] == [
        ("indexer-findings", Severity.UNCHECKED),
        ("picker-answers", Severity.UNCHECKED),
        ("envoy-filter", Severity.UNCHECKED),
    ]


async def test_the_start_up_checks_log_and_return_what_is_wrong_and_send_no_prompt(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="operate.doctor.examine")
    async with pods(HEALTHY) as addresses:
        settings = picker_settings(redis_server.url, addresses)
        found = await run_startup_checks(settings, after_seconds=0)
        ours = [record for record in caplog.records if record.name == "operate.doctor.examine"]
        records = [(record.levelname, record.__dict__["check"]) for record in ours]

    assert [(finding.check, finding.severity, finding.subject) for finding in found] == WITHOUT_INDEXER[:2]
    assert records == [("ERROR", "index-follows"), ("WARNING", "events-flow")]
    assert DoctorSettings(picker=settings).trial  # which the command makes, and this does not


async def test_a_redis_user_without_info_leaves_only_what_info_tells_unchecked(redis_server: RedisServer) -> None:
    client = redis_server.client()
    # as docs/guides/redis-connection.md has it, without +info
    rules = ("~{kv2}*", "+@all", "-@admin", "-@dangerous", "+role")
    client.execute_command("ACL", "SETUSER", "kvmesh", "on", ">secret", *rules)  # type: ignore[no-untyped-call]
    client.close()
    async with pods(HEALTHY) as addresses, indexer(redis_server.url, addresses):
        url = redis_server.url.replace("redis://", "redis://kvmesh:secret@")
        found = await findings(picker_settings(url, addresses))

    assert [(finding.check, finding.severity) for finding in found] == [
        ("redis-answers", Severity.UNCHECKED),
        ("redis-memory", Severity.UNCHECKED),
    ]
    assert "secret" not in repr(found)

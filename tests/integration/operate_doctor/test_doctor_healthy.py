"""A healthy mesh has no finding, and every check has been made."""

from dataclasses import replace
from pathlib import Path

from extproc.pages.findings import Severity
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.admin.admin_login import AdminLogin
from operate.doctor.checks import CHECKS
from operate.doctor.examine import DoctorSettings, examine
from tests.integration.doctor_mesh import HEALTHY, envoy, indexer, picker, picker_settings, pods, two_ports
from tests.integration.kv_redis import RedisServer


async def test_a_healthy_mesh_has_no_finding_and_every_check_was_made(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("correct-horse-battery")
    grpc_port, admin_port = two_ports()
    async with pods(HEALTHY, HEALTHY) as addresses, indexer(redis_server.url, addresses) as indexer_url:
        settings = picker_settings(redis_server.url, addresses, grpc_port=grpc_port, admin_port=admin_port)
        settings = replace(settings, admin_access=AdminAccess(token_file=tmp_path / "token"))
        async with (
            picker(settings) as picker_url,
            envoy(tmp_path, picker_port=grpc_port, endpoints=addresses) as envoy_url,
        ):
            found = await examine(
                DoctorSettings(
                    picker=settings,
                    envoy_admin=envoy_url,
                    picker_admin=picker_url,
                    indexer_admin=indexer_url,
                    login=AdminLogin(token_file=tmp_path / "token"),
                    timeout_seconds=10.0,
                    visible_within_seconds=10.0,
                )
            )

    # a picker that has just started may not have compared tokens yet
    found = tuple(finding for finding in found if finding.check != "picker-tokens")
    wrong = [finding for finding in found if finding.severity is not Severity.OK]
    assert wrong == []
    # no model of this mesh is rendered by pods, none of them prefills for others; its endpoints come from flags, and no
    # policy says how Envoy is to fail
    not_made = {"render", "kv-fetches", "picker-tokens", "envoy-failure-mode", "envoy-retries"}
    made = [name for name in CHECKS if name not in not_made and not name.startswith("pool-")]
    assert [finding.check for finding in found] == made

"""The doctor before real vLLM servers: nothing to find where all is well, and what is planted is found."""

from pathlib import Path

from extproc.pages.findings import Finding, Severity
from tests.e2e.stack import eventually
from tests.integration.doctor_mesh import findings, folder_with, indexer, picker, picker_settings, two_ports
from tests.integration.kv_redis import RedisServer
from tests.vllm.servers import VllmPod


async def test_real_pods_that_are_well_have_no_finding_and_another_chat_template_is_found(
    vllm_pods: tuple[VllmPod, ...], tmp_path: Path
) -> None:
    addresses = [pod.address for pod in vllm_pods]
    planted = folder_with(tmp_path, "chat_template.jinja", lambda page: page + b"{{ ' And be kind.' }}")
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        async with indexer(redis.url, addresses):
            well = await findings(picker_settings(redis.url, addresses), timeout_seconds=60.0)
            grpc_port, admin_port = two_ports()
            settings = picker_settings(
                redis.url, addresses[:1], tokenizer=planted, grpc_port=grpc_port, admin_port=admin_port
            )
            async with picker(settings) as url:

                async def verdicts() -> list[Finding]:
                    found = await findings(settings, picker_admin=url, timeout_seconds=60.0, trial=False)
                    return [each for each in found if each.check == "picker-tokens"]

                def is_found(found: list[Finding]) -> bool:
                    return [each.severity for each in found] == [Severity.ERROR]

                wrong = await eventually(verdicts, is_found, seconds=60.0)
    finally:
        redis.kill()

    assert well == []
    assert "tokens of tiny" in wrong[0].seen

"""The doctor before real vLLM servers: nothing to find where all is well, and what is planted is found."""

from pathlib import Path

from tests.integration.doctor_mesh import findings, folder_with, indexer, only, picker_settings
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
            wrong = await findings(
                picker_settings(redis.url, addresses[:1], tokenizer=planted), timeout_seconds=60.0, trial=False
            )
    finally:
        redis.kill()

    assert well == []
    assert "--chat-template" in only(wrong, "tokens").fix

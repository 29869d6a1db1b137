"""`kvmesh indexer` that finds its pods by itself: in a folder of documents, and through a Kubernetes API."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from kvmesh.blocks.block_keys import root_key
from kvmesh.documents.pools import pool_seed
from kvmesh.index.redis_reader import PrefixIndexReader
from tests.integration.kube_documents import pod, pool
from tests.integration.kv_indexer_processes import IndexerProcess
from tests.integration.kv_pools import eventually_async
from tests.integration.kv_publisher import ScriptedPod, running_pod
from tests.integration.kv_redis import RedisServer, free_port
from tests.kube_api import kube_api
from tests.unit.kv_indexer_follow.kv_fakes import prompt, stored

COMMAND = (sys.executable, "-m", "operate", "indexer")


@contextmanager
def command(redis: RedisServer, folder: Path, *options: str, **environment: str) -> Iterator[IndexerProcess]:
    """Run the command; it ends with the context at the latest."""
    port, log = free_port(), folder / "indexer.log"
    arguments = ["--redis", redis.url, "--indexer-admin-port", str(port), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        yield IndexerProcess(process, name="pools", admin_port=port, log=log)
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture
async def vllm() -> AsyncIterator[ScriptedPod]:
    async with running_pod() as one:
        yield one


async def hits(redis: RedisServer, name: str) -> dict[str, int]:
    reader = PrefixIndexReader(url=redis.url, hash_seed="kvmesh")
    try:
        root = root_key(hash_seed=pool_seed("kvmesh", name), model="tiny")
        return dict((await reader.lookup(prompt(9), root=root)).matched_blocks)
    finally:
        await reader.close()


def port_of(one: ScriptedPod) -> int:
    return int(one.endpoint.rpartition(":")[2])


async def test_a_folder_of_documents_says_whom_to_follow_and_changes_are_taken_up(
    redis_server: RedisServer, tmp_path: Path, vllm: ScriptedPod
) -> None:
    folder = tmp_path / "pools"
    folder.mkdir()
    documents = [pool(ports=(port_of(vllm),)), pod("a", "127.0.0.1")]
    (folder / "llama.yaml").write_text(yaml.safe_dump_all(documents))
    await vllm.publish(stored(1, 2))
    with command(redis_server, tmp_path, "--policies", str(folder)) as indexer:
        await eventually_async(indexer.is_ready, True)
        await eventually_async(lambda: hits(redis_server, "llm/llama"), {vllm.endpoint: 2})

        renamed = [pool("other", ports=(port_of(vllm),)), pod("a", "127.0.0.1")]
        (folder / "new.tmp").write_text(yaml.safe_dump_all(renamed))
        (folder / "new.tmp").rename(folder / "llama.yaml")
        await eventually_async(lambda: hits(redis_server, "llm/other"), {vllm.endpoint: 2})
        assert await hits(redis_server, "llm/llama") == {}
        assert indexer.end(signal.SIGTERM) == 0


async def test_a_kubernetes_api_says_whom_to_follow(
    redis_server: RedisServer, tmp_path: Path, vllm: ScriptedPod
) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(group="inference.networking.k8s.io", version="v1", kind="InferencePool", plural="inferencepools")
        api.put(pool(ports=(port_of(vllm),)))
        api.put(pool(namespace="elsewhere", ports=(port_of(vllm),)))
        api.put(pod("a", "127.0.0.1", ready=False))
        options = ("--kubernetes", "--namespaces", "llm")
        with command(redis_server, tmp_path, *options, KUBECONFIG=str(api.kubeconfig())) as indexer:
            await eventually_async(indexer.is_ready, True)
            assert await hits(redis_server, "llm/llama") == {}
            pools = json.loads((await indexer.page("/pools"))[1])["pools"]
            assert [each["name"] for each in pools] == ["llm/llama"]

            await vllm.publish(stored(1))
            api.put(pod("a", "127.0.0.1"))
            await eventually_async(lambda: hits(redis_server, "llm/llama"), {vllm.endpoint: 1})

            await api.go_down()
            await vllm.publish(stored(2, parent=1))
            await eventually_async(lambda: hits(redis_server, "llm/llama"), {vllm.endpoint: 2})
            await api.come_up()
            api.remove("Pod", "llm/a")
            await eventually_async(lambda: hits(redis_server, "llm/llama"), {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--endpoints and --model missing"),
        (("--model", "tiny"), "--endpoints missing"),
        (("--kubernetes", "--policies", "."), "exclude each other"),
        (("--kubernetes", "--model", "tiny"), "leave out --endpoints and --model"),
        (("--namespaces", "llm", "--endpoints", "a:1", "--model", "tiny"), "--namespaces belongs to --kubernetes"),
        (("--policies", "/nowhere/at/all"), "is no folder"),
        (("--kubernetes",), "KUBECONFIG: there is no file"),
    ],
)
def test_flags_that_do_not_fit_together_are_one_line_and_status_2(
    options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [*COMMAND, "--redis", "redis://127.0.0.1:1/0", "--indexer-admin-port", "0", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)},
    )
    assert (
        ended.returncode,
        [line for line in ended.stderr.splitlines() if words in line and "kvmesh indexer:" in line],
    ) == (
        2,
        [ended.stderr.splitlines()[-1]],
    )

"""A picker that follows a folder, as people start it: the command, files that change, and what it says of them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from operate.local.ports import pick_free_port
from tests.integration.hermetic_picker import Picker
from tests.integration.overload_pods import HeldPod, held_pods
from tests.integration.pools_picker import DocumentDesk, Mesh, pod_document, policy_document, pool_document

HOST = "127.0.0.1"


@asynccontextmanager
async def picker_of(folder: Path) -> AsyncIterator[Mesh]:
    """Run `kvmesh extproc --policies FOLDER` and yield it once it is ready."""
    ports: list[int] = []
    while len(ports) < 3:
        ports.append(pick_free_port(host=HOST, avoid=ports))
    log = folder.with_suffix(".log")
    command = [sys.executable, "-m", "operate", "extproc", "--policies", str(folder), "--scrape-interval-ms", "50"]
    command += ["--grpc-port", str(ports[0]), "--admin-port", str(ports[1]), "--redis", f"redis://{HOST}:{ports[2]}/0"]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, "--drain-seconds", "0", stdout=output, stderr=output, env={**os.environ}
        )
    async with aiohttp.ClientSession() as http:
        picker = Picker(grpc_address=f"{HOST}:{ports[0]}", admin=f"http://{HOST}:{ports[1]}", pods=(), http=http)
        try:
            async with asyncio.timeout(20):
                while not await _is_ready(picker):
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.02)
            yield Mesh(picker=picker, desk=DocumentDesk(), port=0)
        finally:
            process.terminate()
            async with asyncio.timeout(20):
                await process.wait()
    assert "Traceback" not in log.read_text()


async def _is_ready(picker: Picker) -> bool:
    try:
        async with picker.http.get(f"{picker.admin}/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False


def write(folder: Path, pod: HeldPod, **spec: Any) -> None:
    """Put a pool, its pod and a policy into one file, as a whole."""
    port = int(pod.address.rpartition(":")[2])
    documents = [pool_document("a", port=port), pod_document(pod.address, pool="a")]
    if spec:
        documents.append(policy_document("p", pool="a", **spec))
    part = folder / ".part"
    part.write_text(yaml.safe_dump_all(documents))
    part.rename(folder / "pool.yaml")


async def test_files_make_pools_and_policies_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    async with held_pods(1) as (pod,):
        write(folder, pod)
        async with picker_of(folder) as mesh:
            assert await mesh.pick() == pod.address

            write(folder, pod, hosts=["a.example.com"])
            await mesh.eventually("/pools", lambda pools: pools[0]["hosts"] == ["a.example.com"])
            assert await mesh.pick(host="a.example.com") == pod.address

            write(folder, pod, hosts=["b.example.com"], scoring={"weights": {"prefx": 1}})
            explained = await mesh.eventually("/policies", lambda page: "prefx" in str(page))
            assert "llm/p" in str(explained)
            assert (await mesh.picker.get("/pools"))[0]["hosts"] == ["a.example.com"]


async def test_a_target_that_is_not_there_is_a_404(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    async with picker_of(folder) as mesh:
        for path in ("/policies?target=llm/none", "/state?pool=llm/none", "/v1/decisions?pool=llm/none"):
            async with mesh.picker.http.get(mesh.picker.admin + path) as answer:
                assert answer.status == 404, path
                assert "llm/none" in (await answer.json())["error"]


async def test_a_policy_of_another_system_acts_follows_its_file_and_its_differences_are_logged(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    theirs, log = folder / "theirs.yaml", folder.with_suffix(".log")
    metadata = {"namespace": pool_document("a", port=1)["metadata"]["namespace"]}

    def put(**cache: object) -> None:
        part = folder / ".part"
        part.write_text(yaml.safe_dump({"metadata": metadata, "cache": cache, "split_policy": {}, "model": "m"}))
        part.rename(theirs)

    async with held_pods(1) as (pod,):
        write(folder, pod)
        put(min_cache_hit_ratio=0.75)
        async with picker_of(folder) as mesh:

            async def in_force(value: float, problems: int) -> None:
                def fits(answer: dict[str, Any]) -> bool:
                    (explained,) = answer["pools"]
                    return ([each["value"] for each in explained["fields"]], len(answer["problems"])) == (
                        [value],
                        problems,
                    )

                await mesh.eventually("/policies", fits)

            await in_force(0.75, 0)
            put(min_cache_hit_ratio=75)
            await in_force(0.75, 1)
            assert f"{theirs}: cache.min_cache_hit_ratio: must be between 0 and 1" in log.read_text()
            put(min_cache_hit_ratio=0.5)
            await in_force(0.5, 0)
            words = f"{theirs}: read as InferencePolicy {metadata['namespace']}/theirs; differences"
            assert log.read_text().count(words) == 2

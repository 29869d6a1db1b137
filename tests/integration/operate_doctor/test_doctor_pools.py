"""`kvmesh doctor` where pools come from documents: each pool's pods, its part of the index, the policies."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from typer.testing import CliRunner, Result

from extproc.errors import ConfigError
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.settings.config import PickerSettings
from kv_indexer.config import IndexerSettings
from kv_indexer.service import IndexerService
from kvmesh.documents.sources import FolderSource
from operate.doctor.commands import app
from podsim.model_folder import TINY_MODEL
from tests.integration.doctor_mesh import HEALTHY, SEED, folder_with, picker, picker_settings, pods, two_ports
from tests.integration.envoy_process import HOST
from tests.integration.kube_documents import pod, policy
from tests.integration.kv_pools import eventually
from tests.integration.kv_redis import RedisServer


def service(name: str, *, model: str | None = None) -> dict[str, Any]:
    """A pool of the pods whose label `app` is its name, each at its own port."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "namespace": "llm",
            "name": name,
            "labels": {"kvmesh.io/pool": "true"},
            "annotations": {} if model is None else {"kvmesh.io/model": model},
        },
        "spec": {"selector": {"app": name}, "ports": [{"name": "http", "port": 80, "targetPort": "api"}]},
    }


def member(name: str, address: str, *, pool: str, ready: bool = True) -> dict[str, Any]:
    document = pod(name, HOST, app=pool, ready=ready)
    port = {"name": "api", "containerPort": int(address.rpartition(":")[2])}
    return document | {"spec": {"containers": [{"name": "vllm", "ports": [port]}]}}


def folder_of(tmp_path: Path, *documents: dict[str, Any]) -> Path:
    folder = tmp_path / "mesh"
    folder.mkdir(exist_ok=True)
    (folder / "documents.yaml").write_text(yaml.safe_dump_all(documents))
    return folder


@asynccontextmanager
async def indexer_of(folder: Path, redis: RedisServer) -> AsyncIterator[None]:
    """A real indexer of these pools, once it follows all their pods."""
    settings = IndexerSettings(
        host=HOST,
        admin_port=0,
        redis_url=redis.url,
        endpoints=(),
        model="",
        hash_seed=SEED,
        documents=FolderSource(folder),
    )
    running = IndexerService(settings)
    task = asyncio.create_task(running.run(), name="indexer")
    try:
        await eventually(lambda: dict(running.not_ready()), {})
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def doctor(redis: RedisServer, *options: str) -> tuple[int, list[dict[str, str]]]:
    result = await run(redis, *options, "-o", "json")
    assert result.stdout, result.exception
    return result.exit_code, json.loads(result.stdout)


async def run(redis: RedisServer, *options: str) -> Result:
    arguments = ["--redis", redis.url, "--hash-seed", SEED, "--index-timeout-ms", "5000"]
    arguments += ["--timeout-ms", "10000"]
    # in a thread, because it runs a loop of its own beside that of the pods
    return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *options])


def seen(findings: list[dict[str, str]], *severities: str) -> list[tuple[str, str]]:
    return [(each["check"], each["subject"]) for each in findings if each["severity"] in severities]


async def test_each_pool_is_checked_with_its_own_pods_models_and_part_of_the_index(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with pods(HEALTHY, HEALTHY, HEALTHY) as [first, second, third]:
        folder = folder_of(
            tmp_path,
            service("a"),  # its model is what the pods say
            service("b", model="tiny"),
            member("p1", first, pool="a"),
            member("p2", second, pool="a"),
            member("p3", third, pool="b"),
            policy("fair", scoring={"strategy": "kv-aware"}),
        )
        async with indexer_of(folder, redis_server):
            code, findings = await doctor(
                redis_server, "--policies", str(folder), "--model", "tiny", "--tokenizer", str(TINY_MODEL)
            )

    assert (code, seen(findings, "error", "warning", "unchecked")) == (0, []), findings
    told = {each["subject"]: each["seen"] for each in findings if each["check"] == "pool-endpoints"}
    assert told == {
        f"llm/{name}": f"{count} of {count} endpoints ready; blocks under '{SEED}/llm/{name}', model 'tiny'; "
        "policies llm/fair"
        for name, count in (("a", 2), ("b", 1))
    }
    assert {("same-keys", "llm/a"), ("same-keys", "llm/b")} <= set(seen(findings, "ok"))


async def test_what_is_wrong_is_said_of_the_pool_the_document_or_the_policy_that_it_is_about(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    nobody = f"{HOST}:{two_ports()[0]}"
    broken = service("broken") | {"spec": {"selector": {}, "ports": [{"port": 80}]}}
    folder = folder_of(
        tmp_path,
        service("empty"),
        service("dead", model="tiny"),
        service("starting"),
        broken,
        member("p1", nobody, pool="dead"),
        member("p2", f"{HOST}:2", pool="starting", ready=False),
        policy("wrong", scoring={"strategy": "magic"}),
        policy(
            "astray", targetRefs=[{"group": "", "kind": "Service", "name": "nowhere"}], scoring={"strategy": "kv-aware"}
        ),
    )
    code, findings = await doctor(redis_server, "--policies", str(folder), "--no-trial")

    assert code == 1
    assert sorted(seen(findings, "error")) == [
        ("index-follows", "llm/dead index"),
        ("pods-answer", f"llm/dead {nobody}"),
        ("pool-documents", "Service llm/broken"),
        ("pool-endpoints", "llm/empty"),
        ("pool-endpoints", "llm/starting"),
        ("pool-policies", "InferencePolicy llm/astray"),
        ("pool-policies", "InferencePolicy llm/wrong"),
    ]


async def test_a_picker_that_serves_other_pools_is_named(redis_server: RedisServer, tmp_path: Path) -> None:
    grpc_port, admin_port = two_ports()
    async with pods(HEALTHY, HEALTHY) as [first, second]:
        (tmp_path / "picker").mkdir()
        pool_c = (service("c", model="tiny"), member("p2", second, pool="c"))
        served = folder_of(tmp_path / "picker", service("a", model="tiny"), member("p1", first, pool="a"), *pool_c)
        folder = folder_of(
            tmp_path,
            service("a", model="tiny"),
            service("b", model="tiny"),
            member("p1", first, pool="a"),
            member("p2", second, pool="b"),
        )
        async with picker(serving(served, redis_server, grpc_port=grpc_port, admin_port=admin_port)) as url:
            options = ("--policies", str(folder), "--no-trial", "--picker", url, "--grpc-port", str(grpc_port))
            _, findings = await doctor(redis_server, *options, "--pool", "llm/a")
            wrong = [each for each in findings if each["check"] == "pool-picker"]
            _, of_all = await doctor(redis_server, *options)

    assert [each["severity"] for each in wrong] == ["ok"]
    assert [(each["severity"], each["seen"]) for each in of_all if each["check"] == "pool-picker"] == [
        ("error", "does not serve llm/b"),
        ("error", "also serves llm/c"),
    ]


@pytest.mark.parametrize("is_another", [False, True])
async def test_the_running_pickers_verdict_on_the_tokens_of_each_pool_that_it_serves_is_shown(
    redis_server: RedisServer, tmp_path: Path, is_another: bool
) -> None:
    grpc_port, admin_port = two_ports()
    other = folder_with(tmp_path, "chat_template.jinja", lambda page: page + b"{{ ' And be kind.' }}")
    folder_used = other if is_another else TINY_MODEL
    async with pods(HEALTHY, HEALTHY) as [first, second]:
        (tmp_path / "picker").mkdir()
        documents = (service("a", model="tiny"), member("p1", first, pool="a"))
        served = folder_of(tmp_path / "picker", *documents)
        folder = folder_of(tmp_path, *documents, service("b", model="tiny"), member("p2", second, pool="b"))
        settings = serving(served, redis_server, grpc_port=grpc_port, admin_port=admin_port)
        tiny = ModelTable(
            served=(ServedModel(name="tiny", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=folder_used),)
        )
        async with picker(replace(settings, models=tiny)) as url, aiohttp.ClientSession() as http:
            async with asyncio.timeout(60):
                while await verdict(http, url) not in ("exact", "differs"):
                    await asyncio.sleep(0.05)
            options = ("--policies", str(folder), "--no-trial", "--picker", url, "--grpc-port", str(grpc_port))
            _, findings = await doctor(redis_server, *options)

    (found,) = [each for each in findings if each["check"] == "picker-tokens"]
    if is_another:
        assert (found["severity"], found["subject"].split()[0]) == ("error", "llm/a")
        assert "tokens of tiny: the folder makes other tokens than 1 of 1 pods" in found["seen"]
    else:
        assert (found["severity"], found["subject"]) == ("ok", "llm/a")


async def verdict(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(f"{url}/state", params={"pool": "llm/a"}) as answer:
        state = await answer.json()
    return str(state["token_states"].get("tiny", [""])[0])


def serving(folder: Path, redis: RedisServer, *, grpc_port: int, admin_port: int) -> PickerSettings:
    plain = picker_settings(redis.url, [], model=None, tokenizer=None, grpc_port=grpc_port, admin_port=admin_port)
    return PickerSettings(
        **{name: getattr(plain, name) for name in PickerSettings.__dataclass_fields__} | {"policies_folder": folder}
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--endpoints", "127.0.0.1:1", "--pool", "llm/a"), "belong to --kubernetes or --policies"),
        (("--endpoints", "127.0.0.1:1", "--policies", "."), "leave them out with --kubernetes or --policies"),
        (("--policies", ".", "--kubernetes"), "the one or the other"),
        (("--policies", ".", "--pool", "llm/nowhere"), "no pool 'llm/nowhere'"),
    ],
)
async def test_options_that_do_not_say_what_to_check_are_refused(
    redis_server: RedisServer, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    options = tuple(str(tmp_path) if option == "." else option for option in options)
    result = await run(redis_server, *options)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)

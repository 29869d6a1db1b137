"""What `Pools` makes of configurations: nothing is half done, and one pool's trouble is no other's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from extproc.admission.flow_queue import FlowQueue
from extproc.errors import NoPoolForHostError, TokenizerError
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy
from extproc.policy.priority import Quota
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy, PoolConfig
from extproc.pools import pools as module
from extproc.pools.pool_tokens import TEMPLATE_LIMITS, TOKENIZER_FOLDER
from extproc.pools.pools import Pools
from extproc.pools.shared_resources import SharedResources
from extproc.prefixes.routing_memory import RoutingMemory
from extproc.prompts.retries import FIRST_SECONDS
from extproc.prompts.tokenizer_cache import TokenizerCache
from extproc.settings.config import PickerSettings
from tests.integration.hermetic_picker import SETTINGS

A, B = PoolConfig(name="llm/a"), PoolConfig(name="llm/b")
OTHER, _ = pick_policy({"scoring": {"strategy": "round-robin"}})


def made(folder: Path, **changes: Any) -> Pools:
    nowhere = {"grpc_port": 1, "admin_port": 2, "redis_url": "redis://127.0.0.1:1/0", "endpoints": ()}
    return Pools(SharedResources(PickerSettings(**SETTINGS | nowhere | {"policies_folder": folder} | changes)))


def named(*configs: PoolConfig) -> dict[str, PoolConfig]:
    return {config.name: config for config in configs}


@asynccontextmanager
async def running(pools: Pools) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(pools.run(), name="pools")
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await pools.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not holds():
            await asyncio.sleep(0.001)


async def test_a_pool_that_comes_back_while_another_one_is_closed_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    pools = made(tmp_path)
    async with running(pools) as task:
        await pools.apply(named(A, B))
        first, other = pools.all["llm/a"], pools.all["llm/b"]
        closing, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> None:
            closing.set()
            await go_on.wait()

        monkeypatch.setattr(first.quotas, "close", slowly)
        await pools.apply({})
        await closing.wait()
        await pools.apply(named(B))
        go_on.set()
        await until(lambda: not set(pools.with_requests) - {"llm/b"})
        await asyncio.sleep(0.01)

        assert not task.done()
        assert pools.all["llm/b"] is other


async def test_a_defect_of_a_pool_that_is_closed_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    pools = made(tmp_path)
    async with running(pools) as task:
        await pools.apply(named(A, B))

        async def fails() -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(pools.all["llm/a"].quotas, "close", fails)
        await pools.apply(named(B))
        await until(lambda: "llm/a" not in pools.with_requests and "the pool has failed" in caplog.text)

        assert not task.done()


async def test_a_defect_at_each_look_is_logged_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    pools = made(tmp_path)
    async with running(pools):
        await pools.apply(named(A, B))
        looks = []

        def fails() -> None:
            looks.append(1)
            raise RuntimeError("a defect")

        for pool in pools.all.values():
            monkeypatch.setattr(pool.scale, "look", fails)
        await until(lambda: len(looks) >= 10)
    assert sorted(vars(record)["pool"] for record in caplog.records if "has failed" in record.message) == [
        "llm/a",
        "llm/b",
    ]


async def test_what_could_not_be_applied_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = made(tmp_path)
    await pools.apply(named(A))
    changed = replace(A, policy=OTHER)
    with monkeypatch.context() as broken:
        broken.setattr(pools.all["llm/a"].telemetry, "reconfigure", lambda _: 1 / 0)
        await pools.apply(named(changed))
    assert pools.all["llm/a"].config is A

    await pools.apply(named(changed))

    assert pools.all["llm/a"].config is changed
    await pools.close()


async def test_a_promised_time_a_token_counts_from_the_policy_that_has_it_on(tmp_path: Path) -> None:
    pools = made(tmp_path)
    await pools.apply(named(A))
    assert pools.all["llm/a"].runtime.view.promises.seconds == {}
    document = {"priorities": {"classes": [{"name": "critical", "interTokenSeconds": 0.03}]}}
    strict, _ = pick_policy(read_policy_file(document))
    await pools.apply(named(replace(A, policy=strict)))
    promises = pools.all["llm/a"].runtime.view.promises
    assert (promises.seconds, promises.tightest_seconds) == ({"critical": 0.03}, 0.03)
    assert [promises.is_low(name) for name in ("critical", "standard", "")] == [False, True, False]
    await pools.close()


async def test_a_tokenizer_that_cannot_be_used_ends_nothing_whatever_is_wrong_with_it(tmp_path: Path) -> None:
    pools = made(tmp_path)
    served = [
        ServedModel(name=f"m{i}", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=folder)
        for i, folder in enumerate((Path("/nowhere"), Path("/etc/passwd"), Path("a\0b"), Path("x" * 5000)))
    ]
    table = replace(A.models, served=tuple(served))
    async with running(pools) as task:
        await pools.apply(named(replace(A, models=table)))
        await until(lambda: not [each for each in asyncio.all_tasks() if "load tokenizers" in each.get_name()])

        assert not task.done()
        assert pools.names == ("llm/a",)


async def test_with_many_pools_each_remembers_less_also_those_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    reconfigure = RoutingMemory.reconfigure

    def noted(self: RoutingMemory, policy: PickPolicy, *, share: float = 1.0) -> None:
        shares.append(share)
        reconfigure(self, policy, share=share)

    monkeypatch.setattr(RoutingMemory, "reconfigure", noted)
    pools, many = made(tmp_path), [PoolConfig(name=f"llm/{i}") for i in range(8)]
    await pools.apply(named(*many[:4]))
    assert not shares
    await pools.apply(named(*many))
    assert shares == [0.5] * 8
    await pools.apply(named(*many[:7], replace(many[7], policy=OTHER)))
    assert shares == [0.5] * 9
    await pools.apply(named(*many[:2]))
    assert shares[9:] == [1.0] * 2
    await pools.close()


async def test_the_only_pool_gets_no_hosts_of_others_while_they_are_gone(tmp_path: Path) -> None:
    pools, config = made(tmp_path), replace(A, hosts=frozenset({"a.example.com"}))
    await pools.apply(named(config))
    assert pools.for_host("a.example.com").name == "llm/a"
    with pytest.raises(NoPoolForHostError):
        pools.for_host("b.example.com")

    await pools.apply(named(A))

    assert pools.for_host("b.example.com").name == "llm/a"
    await pools.close()


async def test_a_host_that_moves_to_another_pool_is_never_nobodys(tmp_path: Path) -> None:
    pools, host = made(tmp_path), frozenset({"a.example.com"})
    await pools.apply(named(replace(A, hosts=host), B))
    change = asyncio.create_task(pools.apply(named(A, replace(B, hosts=host))), name="change")
    seen = {pools.for_host("a.example.com").name}
    while not change.done():
        await asyncio.sleep(0)
        seen.add(pools.for_host("a.example.com").name)
    assert seen == {"llm/a", "llm/b"}
    await pools.close()


async def test_a_change_of_something_else_leaves_the_order_of_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PriorityPolicy] = []
    monkeypatch.setattr(FlowQueue, "reconfigure", lambda _, policy: seen.append(policy))
    pools = made(tmp_path)
    await pools.apply(named(A))
    await pools.apply(named(replace(A, policy=OTHER)))
    assert not seen

    quotas = replace(OTHER.priorities, quotas=(Quota(tenant="*", concurrent_requests=3),))
    await pools.apply(named(replace(A, policy=replace(OTHER, priorities=quotas))))

    assert seen == [quotas]
    await pools.close()


async def test_headers_are_read_before_the_first_request_of_a_pool_that_needs_them(tmp_path: Path) -> None:
    read: list[tuple[tuple[str, ...], bool]] = []

    def changed() -> None:
        read.append((tuple(pools.names), "x-team" in pools.wanted_headers()))

    parts = made(tmp_path)._resources
    pools = Pools(parts, changed=changed)
    policy, _ = pick_policy({"priorities": {"tenants": {"header": "x-team"}}})
    await pools.apply(named(replace(A, policy=policy)))
    assert read == [((), True), (("llm/a",), True)]
    await pools.apply({})
    assert read[-1] == ((), False)
    await pools.close()


async def test_tokenizers_that_no_pool_has_any_more_are_let_go(tmp_path: Path) -> None:
    pools = made(tmp_path)
    cache, model = (
        pools._resources.tokenizers,
        ServedModel(name="m", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=tmp_path),
    )
    cache._load = lambda _: object()  # type: ignore[assignment,return-value]
    await cache.load((model,))
    await pools.apply(named(replace(A, models=replace(A.models, served=(model,)))))
    assert not cache.lacks((model,))

    await pools.apply(named(A))

    assert cache.lacks((model,))
    await pools.close()


async def test_many_pools_that_want_the_same_tokenizer_load_it_once() -> None:
    loads: list[str] = []

    def load(model: ServedModel) -> Any:
        loads.append(model.name)
        return object()

    cache = TokenizerCache(load)
    model = ServedModel(name="m", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=Path("/models/m"))
    await asyncio.gather(*[cache.load((model,)) for _ in range(20)])
    assert loads == ["m"]


async def test_the_name_by_which_the_picker_is_called_decides_before_the_host(tmp_path: Path) -> None:
    called_as, host = "outbound|9002||picker-a.llm.svc.cluster.local", "b.example.com"
    a = replace(A, endpoint_picker="llm/picker-a")
    b = replace(B, hosts=frozenset({host}))
    pools = made(tmp_path)
    await pools.apply(named(a, b))
    request = RequestFacts(
        method="POST", path="/", objective=None, request_id="", headers={":authority": host}, called_as=called_as
    )

    assert pools.of_request(request).name == A.name
    assert pools.of_request(msgspec.structs.replace(request, pool=B.name)).name == B.name
    assert pools.of_request(msgspec.structs.replace(request, called_as="picker.kvmesh-system.svc")).name == B.name
    await pools.apply(named(a, replace(b, endpoint_picker="llm/picker-a")))
    assert pools.of_request(request).name == B.name  # both are called so: the host decides
    await pools.close()


async def test_a_folder_that_cannot_be_loaded_is_a_finding_and_is_taken_up_when_it_can(tmp_path: Path) -> None:
    problem, now = "there is no tokenizer.json", 0.0

    def load(model: ServedModel) -> Any:
        if problem:
            raise TokenizerError(problem)
        return SimpleNamespace(engine="scripted", breach="")

    pools = made(tmp_path)
    model = ServedModel(name="m", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=tmp_path)
    cache = pools._resources.tokenizers = TokenizerCache(load, clock=lambda: now)
    config = replace(A, models=replace(A.models, served=(model,)))
    await cache.load((model,))
    await pools.apply(named(config))
    pool = pools.all["llm/a"]
    pool.tokens.reporter.look()
    assert problem in pool.tokens.reporter.findings["m", TOKENIZER_FOLDER].message
    assert not pool.prompts.tokenizers

    problem, now = "", FIRST_SECONDS
    assert [await cache.refresh() for _ in range(2)].count(True) == 1
    pool.apply(config)
    pool.tokens.reporter.look()

    assert (list(pool.prompts.tokenizers), dict(pool.tokens.reporter.findings)) == (["m"], {})
    await pools.close()


async def test_a_template_that_broke_its_limits_is_a_finding(tmp_path: Path) -> None:
    pools = made(tmp_path)
    model = ServedModel(name="m", tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=tmp_path)
    loaded: Any = SimpleNamespace(engine="scripted", breach="it takes more time than a template may")
    cache = pools._resources.tokenizers = TokenizerCache(lambda _: loaded)
    await cache.load((model,))
    await pools.apply(named(replace(A, models=replace(A.models, served=(model,)))))
    pool = pools.all["llm/a"]
    pool.tokens.reporter.look()
    assert "than a template may" in pool.tokens.reporter.findings["m", TEMPLATE_LIMITS].message
    [shown] = pool.model_tokens()
    assert shown.reason == TEMPLATE_LIMITS
    await pools.close()


async def test_a_folder_that_appears_later_is_taken_up_for_a_declared_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLDERS_EVERY_SECONDS", 0.001)
    loads: list[str] = []

    def load(model: ServedModel) -> Any:
        loads.append(model.name)
        return SimpleNamespace(engine="scripted", breach="")

    folder = tmp_path / "org" / "m"
    pools = made(tmp_path, tokenizer_folders=tmp_path)
    pools._resources.tokenizers = TokenizerCache(load)
    async with running(pools):
        await pools.apply(named(replace(A, model="org/m", models=ModelTable(served=(ServedModel(name="org/m"),)))))
        pool = pools.all["llm/a"]
        assert [model.wanted for model in pool.model_tokens()] == ["auto"]
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{}")
        await until(lambda: bool(pool.prompts.tokenizers))

        assert [model.wanted for model in pool.model_tokens()] == ["tokenizer"]
        await until(lambda: not [each for each in asyncio.all_tasks() if "load tokenizers" in each.get_name()])
        assert loads == ["org/m"]

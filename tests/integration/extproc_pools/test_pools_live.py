"""Several pools behind one picker, changed while requests run: the whole picker, pods on several addresses."""

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from extproc.pools import pool_runtime
from extproc.settings.observation_settings import AccessLogTargets, ObservationSettings
from podsim.model_folder import TINY_MODEL
from tests.integration.hermetic_envoy import Refused
from tests.integration.otlp_collector import collector, spans_of
from tests.integration.overload_pods import HeldPod
from tests.integration.pools_picker import (
    Mesh,
    pod_document,
    policy_document,
    pool_document,
    running_mesh,
    send,
)

WITHIN_SECONDS = 1.0  # after a change of documents


async def two_pools(mesh: Mesh) -> tuple[str, str]:
    """Have the pools llm/a and llm/b with a pod each, and return the pods' addresses."""
    mesh.desk.put(
        pool_document("a", port=mesh.port, hosts="a.example.com"),
        pool_document("b", port=mesh.port, hosts="*.b.example.com"),
    )
    one, other = await mesh.pod("a"), await mesh.pod("b")
    await mesh.serves("llm/a", one.address)
    await mesh.serves("llm/b", other.address)
    return one.address, other.address


async def test_metadata_names_the_pool_whatever_the_host(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        one, other = await two_pools(mesh)

        assert await mesh.pick(pool="llm/a") == one
        assert await mesh.pick(pool="llm/b", host="a.example.com") == other


async def test_a_pool_that_is_not_known_is_a_clear_503(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        await two_pools(mesh)

        found = await mesh.asked(pool="llm/c", host="a.example.com")

        assert isinstance(found, Refused)
        assert (found.status, found.reason) == (503, "unknown-pool")


async def test_the_host_tells_the_pool_where_the_gateway_names_none(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        one, other = await two_pools(mesh)

        assert await mesh.pick(host="A.example.com:8443") == one
        assert await mesh.pick(host="eu.b.example.com") == other


async def test_the_cluster_that_envoy_has_dealt_the_request_to_goes_before_the_routes_metadata(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        one, other = await two_pools(mesh)

        cluster = f"outbound|{mesh.port}||b.llm.svc.cluster.local"
        assert await mesh.pick(pool="llm/a", cluster=cluster) == other
        assert await mesh.pick(pool="llm/a", cluster="outbound|80||elsewhere.llm.svc.cluster.local") == one


async def test_a_host_of_no_pool_is_a_clear_404(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        await two_pools(mesh)

        found = await mesh.asked(host="c.example.com")

        assert isinstance(found, Refused)
        assert (found.status, found.reason) == (404, "no-pool-for-host")


async def test_the_only_pool_needs_no_name(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)

        assert await mesh.pick(host="whatever.example.com") == pod.address


async def test_without_any_pool_requests_are_answered_503(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        found = await mesh.asked()

        assert isinstance(found, Refused)
        assert (found.status, found.reason) == (503, "unknown-pool")


async def test_a_new_pod_gets_requests_within_a_second_and_one_that_ends_gets_none_but_finishes(
    tmp_path: Path,
) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port))
        old = await mesh.pod("a")
        await mesh.serves("llm/a", old.address)
        async with mesh.exchange(pool="llm/a") as exchange:
            routed = await send(exchange)
            assert routed.endpoints[0] == old.address

            new = await mesh.pod("a")
            mesh.desk.put(pod_document(old.address, pool="a", terminating=True))
            began = time.monotonic()
            while await mesh.pick(pool="llm/a") != new.address:
                await asyncio.sleep(0.01)
            assert time.monotonic() - began < WITHIN_SECONDS
            mesh.desk.remove("Pod", "llm/pod-127-0-1-1")
            await mesh.serves("llm/a", new.address)
            assert {await mesh.pick(pool="llm/a", prompt=f"{i}") for i in range(8)} == {new.address}
            await mesh.eventually("/pools", lambda pools: pools[0]["open_requests"] == 1)

            await exchange.response(b"{}")

        await mesh.eventually("/pools", lambda pools: pools[0]["open_requests"] == 0)
        page = await mesh.picker.get("/metrics")
        assert f'endpoint="{old.address}"' not in page
        assert f'endpoint="{new.address}"' in page


async def test_a_pod_that_is_not_ready_gets_nothing(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port))
        one, other = await mesh.pod("a"), await mesh.pod("a")
        await mesh.serves("llm/a", one.address, other.address)

        mesh.desk.put(pod_document(one.address, pool="a", ready=False))
        await mesh.serves("llm/a", other.address)

        assert {await mesh.pick(pool="llm/a", prompt=f"{i}") for i in range(8)} == {other.address}


async def test_a_pool_that_is_gone_lets_its_requests_finish_and_goes_on_when_it_comes_back(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        pool = pool_document("a", port=mesh.port)
        mesh.desk.put(pool)
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        async with mesh.exchange(pool="llm/a") as exchange:
            await send(exchange)
            mesh.desk.remove("InferencePool", "llm/a")
            await mesh.eventually("/pools", lambda pools: pools == [])
            found = await mesh.asked(pool="llm/a")
            assert isinstance(found, Refused)
            assert found.reason == "unknown-pool"

            mesh.desk.put(pool)
            await mesh.serves("llm/a", pod.address)
            await mesh.eventually("/pools", lambda pools: pools[0]["open_requests"] == 1)
            await exchange.response(b"{}")

        await mesh.eventually("/pools", lambda pools: pools[0]["open_requests"] == 0)
        assert await mesh.pick(pool="llm/a") == pod.address


async def test_who_waits_in_a_pool_that_is_deleted_and_made_again_goes_to_the_new_one(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        pod.fill()
        await mesh.eventually("/state?pool=llm/a", lambda state: state["endpoints"][0]["waiting"] == 100)
        async with mesh.exchange(pool="llm/a") as exchange:
            waiting = asyncio.create_task(send(exchange))
            await mesh.eventually("/pools", lambda pools: pools[0]["waiting"] == 1)
            mesh.desk.remove("InferencePool", "llm/a")
            await mesh.eventually("/pools", lambda pools: pools == [])
            mesh.desk.remove("Pod", f"llm/pod-{pod.address.rpartition(':')[0].replace('.', '-')}")
            found = await mesh.asked(pool="llm/a")

            other = await mesh.pod("a")
            mesh.desk.put(pool_document("a", port=mesh.port))

            assert isinstance(found, Refused)
            assert found.reason == "unknown-pool"
            assert (await waiting).endpoints == (other.address,)


async def test_who_waits_in_a_pool_that_stays_away_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.pools.pools.RETURN_SECONDS", 0.0)
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        pod.fill()
        await mesh.eventually("/state?pool=llm/a", lambda state: state["endpoints"][0]["waiting"] == 100)
        async with mesh.exchange(pool="llm/a") as exchange:
            waiting = asyncio.create_task(send(exchange))
            await mesh.eventually("/pools", lambda pools: pools[0]["waiting"] == 1)
            mesh.desk.remove("InferencePool", "llm/a")

            found = await waiting
            assert (found.status, found.reason) == (503, "no-ready-endpoint")


async def test_a_model_that_only_pods_tell_gets_its_tokenizer_by_name_and_its_aliases(tmp_path: Path) -> None:
    folders = tmp_path / "tokenizers"
    shutil.copytree(TINY_MODEL, folders / "org" / "tiny")
    async with running_mesh(tmp_path, tokenizer_folders=folders) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port))
        pod = await mesh.pod("a", models=("org/tiny", "alias"))
        await mesh.serves("llm/a", pod.address)

        async def explained(model: str) -> dict[str, Any]:
            url = f"{mesh.picker.admin}/v1/explain?path=/v1/completions&pool=llm/a"
            async with mesh.picker.http.post(url, json={"model": model, "prompt": "the same words " * 40}) as response:
                found: dict[str, Any] = await response.json()
                return found

        async with asyncio.timeout(10):
            lacking = {"models-unknown", "no-tokenizer", "render-unavailable"}
            while not lacking.isdisjoint((await explained("alias"))["degraded"]):
                await asyncio.sleep(0.02)
        await mesh.pick(pool="llm/a", model="alias", prompt="the same words " * 40)

        found = await explained("org/tiny")
        assert 0 < found["matched_tokens"] <= found["prompt_tokens"]


async def test_a_policy_changes_the_queue_without_losing_who_waits(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        pod.fill()
        await mesh.eventually("/state?pool=llm/a", lambda state: state["endpoints"][0]["waiting"] == 100)
        async with mesh.exchange(pool="llm/a") as first, mesh.exchange(pool="llm/a") as second:
            waiting = asyncio.create_task(send(first))
            await mesh.eventually("/pools", lambda pools: pools[0]["waiting"] == 1)
            mesh.desk.put(policy_document("p", pool="a", priorities={"defaultClass": "critical"}))
            await mesh.eventually("/pools", lambda pools: pools[0]["policies"] == ["llm/p"])
            also = asyncio.create_task(send(second))
            await mesh.eventually("/pools", lambda pools: pools[0]["waiting"] == 2)
            classes = (await mesh.picker.get("/state?pool=llm/a"))["classes"]
            assert {line["class"]: line["waiting"] for line in classes} == {
                "critical": 1,
                "standard": 1,
                "sheddable": 0,
            }

            pod.free()

            assert (await waiting).endpoints == (await also).endpoints == (pod.address,)


async def test_a_policy_that_ends_queueing_lets_those_go_that_wait(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        pod.fill()
        await mesh.eventually("/state?pool=llm/a", lambda state: state["endpoints"][0]["waiting"] == 100)
        async with mesh.exchange(pool="llm/a") as exchange:
            waiting = asyncio.create_task(send(exchange))
            await mesh.eventually("/pools", lambda pools: pools[0]["waiting"] == 1)

            mesh.desk.put(policy_document("p", pool="a", load={"overload": {"enabled": False}}))

            assert (await waiting).endpoints == (pod.address,)


async def test_a_bad_policy_changes_nothing(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port), policy_document("p", pool="a", hosts=["a.example.com"]))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        await mesh.eventually("/pools", lambda pools: pools[0]["hosts"] == ["a.example.com"])

        mesh.desk.put(policy_document("p", pool="a", hosts=["b.example.com"], scoring={"weights": {"prefx": 1}}))
        mesh.desk.put(pool_document("b", port=mesh.port, hosts="b.example.com"))

        await mesh.eventually("/pools", lambda pools: len(pools) == 2)
        assert await mesh.pick(host="a.example.com") == pod.address


async def test_what_was_routed_in_one_pool_is_not_expected_in_another(tmp_path: Path) -> None:
    prompt = "the same beginning " * 200
    async with running_mesh(tmp_path) as mesh:
        one, other = await two_pools(mesh)
        assert await mesh.pick(pool="llm/a", prompt=prompt) == one

        async def matched(pool: str) -> int:
            url = f"{mesh.picker.admin}/v1/explain?path=/v1/completions&pool={pool}"
            async with mesh.picker.http.post(url, json={"model": "tiny", "prompt": prompt}) as response:
                return int((await response.json())["matched_tokens"])

        assert await matched("llm/a") > 0
        assert await matched("llm/b") == 0
        assert await mesh.pick(pool="llm/b", prompt=prompt) == other


async def test_each_pools_metrics_bear_its_name(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        one, _ = await two_pools(mesh)
        await mesh.pick(pool="llm/a")
        await mesh.pick(pool="llm/a")
        await mesh.pick(pool="llm/b")
        await mesh.asked(pool="llm/c")

        def counted(page: str) -> bool:
            return (
                f'kvmesh_picks_total{{pool="llm/a",endpoint="{one}"}} 2.0' in page
                and 'kvmesh_decisions_total{pool="llm/b",outcome="routed"} 1.0' in page
                and 'kvmesh_unrouted_requests_total{reason="unknown-pool"} 1.0' in page
            )

        page = await mesh.eventually("/metrics", counted)
        families = [line for line in page.splitlines() if line.startswith("# TYPE")]
        assert len(families) == len(set(families))


async def test_a_pool_that_fails_open_sends_a_request_that_nobody_seems_to_serve_all_the_same(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port), policy_document("p", pool="a", failureMode="FailOpen"))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        await mesh.eventually("/pools", lambda pools: pools[0]["policies"] == ["llm/p"])
        await pod.stop()
        await mesh.eventually("/state?pool=llm/a", lambda state: state["endpoints"][0]["state"] == "unreachable")

        assert await mesh.pick(pool="llm/a") == pod.address
        assert await mesh.picker.metric('kvmesh_decisions_total{pool="llm/a",outcome="failed-open"}') == 1

        mesh.desk.put(policy_document("p", pool="a", failureMode="FailClose"))
        async with asyncio.timeout(10):
            while not isinstance(found := await mesh.asked(pool="llm/a"), Refused):
                await asyncio.sleep(0.01)
        assert (found.status, found.reason) == (503, "no-ready-endpoint")


async def test_roles_and_cordons_of_labels_change_while_the_pool_serves(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        policy = policy_document("p", pool="a", failureMode="FailOpen", disaggregation={"enabled": True})
        mesh.desk.put(pool_document("a", port=mesh.port), policy)
        one, two = await mesh.pod("a"), await mesh.pod("a")
        await mesh.serves("llm/a", one.address, two.address)

        async def labelled(pod: HeldPod, role: str, **labels: str) -> None:
            mesh.desk.put(pod_document(pod.address, pool="a", labels={"llm-d.ai/role": role, **labels}))
            await mesh.eventually(
                "/state?pool=llm/a",
                lambda state: {each["address"]: each["role"] for each in state["endpoints"]}[pod.address] == role,
            )

        await labelled(one, "prefill")
        assert {await mesh.pick(pool="llm/a") for _ in range(8)} == {two.address}
        await labelled(one, "both")
        await labelled(two, "prefill")
        assert {await mesh.pick(pool="llm/a") for _ in range(8)} == {one.address}
        await labelled(one, "prefill")  # nobody is left to answer, and failing open sends nothing to prefill pods
        found = await mesh.asked(pool="llm/a")
        assert isinstance(found, Refused)
        assert (found.status, found.reason) == (503, "no-ready-endpoint")
        await labelled(one, "decode", **{"kvmesh.io/cordon": "true"})
        assert isinstance(await mesh.asked(pool="llm/a"), Refused)
        await labelled(two, "decode")
        assert await mesh.pick(pool="llm/a") == two.address


async def test_requests_without_a_decision_or_a_pool_have_their_line_and_their_span(tmp_path: Path) -> None:
    file, spans = tmp_path / "access.log", list[Any]()
    observed = ObservationSettings(access_log=AccessLogTargets(file=file), trace_share=1.0)
    async with (
        collector(spans) as address,
        running_mesh(tmp_path, observation=observed, otlp_endpoint=address) as mesh,
    ):
        mesh.desk.put(pool_document("a", port=mesh.port), policy_document("p", pool="a", failureMode="FailOpen"))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        await mesh.eventually("/pools", lambda pools: pools[0]["policies"] == ["llm/p"])
        await pod.stop()
        await mesh.eventually("/state?pool=llm/a", lambda state: state["endpoints"][0]["state"] == "unreachable")
        assert await mesh.pick(pool="llm/a") == pod.address
        assert isinstance(await mesh.asked(pool="llm/nobody"), Refused)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found = [[line.get(name) for name in ("fate", "pool", "endpoint", "reason", "status")] for line in lines]
    assert sorted(found) == [
        ["failed-open", "llm/a", pod.address, "no-ready-endpoint", 0],
        ["refused", None, None, "unknown-pool", 503],
    ]
    (opened,) = [line for line in lines if line["fate"] == "failed-open"]
    assert opened["class"] == "standard"
    exchanges = [span["attributes"] for span in spans_of(spans) if span["kind"] == 2]
    assert {each["error.type"] for each in exchanges} == {"no-answer", "unknown-pool"}


async def test_a_pick_that_fails_at_its_end_leaves_no_booking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        with monkeypatch.context() as broken:
            broken.setattr(pool_runtime, "plan_response", lambda *_, **__: 1 / 0)
            found = await mesh.asked(pool="llm/a")
        assert isinstance(found, Refused)
        assert (found.status, found.reason) == (500, "internal-error")
        assert [line["open_requests"] for line in await mesh.picker.get("/pools")] == [0]

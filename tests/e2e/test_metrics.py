"""The metrics of a running mesh: all documented, true to what clients saw, and bounded whatever clients write."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from extproc.ledger import metrics as picker
from kv_indexer.telemetry import metrics as indexer
from tests.e2e.stack import Stack, eventually, running_stack

TINY_MODEL = Path(__file__).parents[2] / "podsim" / "tiny_model"
SETTINGS: Mapping[str, Any] = {
    "scrape_interval_ms": 100,
    "index_timeout_ms": 1000,
    "sample_share": 1.0,
    "policy": {
        "observability": {"podHourPrice": 3.6, "currency": "EUR"},
        "quotas": [{"tenant": "acme", "requestsPerMinute": 100_000}],
        "models": {
            "served": [{"name": "tiny", "tokenizer": str(TINY_MODEL)}],
            "rules": [{"model": "chat", "targets": [{"model": "tiny", "weight": 1}]}],
        },
    },
}
TENANT, OBJECTIVE = "x-gateway-inference-fairness-id", "x-gateway-inference-objective"
PROMPT = " ".join(f"word{i}" for i in range(200))
PLANTED = "planted-9f2c"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path_factory.mktemp("stack"), settings=json.dumps(SETTINGS), pods=2) as running:
        yield running


async def page(mesh: Stack, which: str) -> str:
    async with mesh.http.get(f"{mesh.ready[which]}/metrics") as response:
        assert response.status == 200
        return await response.text()


def series(text: str, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Return the samples of this exact name by their labels."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def say(
    mesh: Stack,
    *,
    prompt: str = PROMPT,
    model: str = "chat",
    stream: bool = False,
    tenant: str = "acme",
    headers: Mapping[str, str] = {},
) -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = await mesh.send("POST", "/v1/completions", headers={TENANT: tenant, **headers}, json=body)
    return answer.status


async def test_what_clients_saw_is_what_the_picker_counts(mesh: Stack) -> None:
    assert await say(mesh) == 200
    await mesh.indexed(PROMPT, tokens=16)
    assert [await say(mesh, stream=True) for _ in range(3)] == [200, 200, 200]

    async def counted() -> str:
        return await page(mesh, "admin")

    # the pods' histograms are read every five seconds
    text = await eventually(counted, lambda text: sum(series(text, "kvmesh_ttft_seconds_count").values()) >= 3)
    chat = (("arm", "tiny"), ("model", "chat"))
    assert series(text, "kvmesh_model_requests_total") == {(chat[0], chat[1], ("status", "2xx")): 4.0}
    assert series(text, "kvmesh_model_request_seconds_count") == {chat: 4.0}
    assert series(text, "kvmesh_model_usages_total") == {chat: 4.0}
    assert series(text, "kvmesh_model_generated_tokens_total") == {chat: 16.0}
    assert series(text, "kvmesh_model_first_token_seconds_count") == {chat: 3.0}  # the first one was no stream
    assert series(text, "kvmesh_expected_ttft_seconds_count") == {(("model", "tiny"),): 4.0}
    assert series(text, "kvmesh_ready") == {(): 1.0}
    assert series(text, "kvmesh_index_problem") == {(): 0.0}
    assert set(series(text, "kvmesh_ttft_seconds_count")) == {(("model", "tiny"), ("role", "both"))}
    assert set(series(text, "kvmesh_inter_token_seconds_count")) == {(("model", "tiny"), ("role", "both"))}
    (saved,) = series(text, "kvmesh_saved_prefill_seconds_total").values()
    (money,) = series(text, "kvmesh_saved_money_total").values()
    assert saved > 0
    assert money == pytest.approx(saved * 3.6 / 3600)
    acme = (("tenant", "acme"),)
    assert series(text, "kvmesh_tenant_prompt_tokens_total")[acme] == sum(
        series(text, "kvmesh_prompt_tokens_total").values()
    )
    assert series(text, "kvmesh_tenant_quota_decisions_total") == {(("outcome", "allowed"), *acme): 4.0}


async def test_what_redis_tells_of_is_not_asked_for(mesh: Stack) -> None:
    prompt = " ".join(f"letter{i}" for i in range(1000))

    async def blocks() -> tuple[float, float, float]:
        text = await page(mesh, "admin")
        looked_up = series(text, "kvmesh_index_lookup_blocks_total")
        (tracked,) = series(text, "kvmesh_index_tracked_blocks").values()
        return looked_up[(("source", "known"),)], looked_up[(("source", "redis"),)], tracked

    async def one_more() -> tuple[float, float, float]:
        known, asked, _ = await blocks()
        assert await say(mesh, prompt=prompt) == 200
        now_known, now_asked, tracked = await blocks()
        return now_known - known, now_asked - asked, tracked

    known, asked, _ = await eventually(one_more, lambda told: told[0] == told[2] > 0)
    assert known % 64 == 0
    assert 0 < asked < 64


async def test_every_series_of_both_processes_is_documented(mesh: Stack) -> None:
    assert await say(mesh) == 200
    for which, metrics in (("admin", picker.METRICS), ("indexer_admin", indexer.METRICS)):
        declared = {metric.name: (metric.kind.value, set(metric.labels)) for metric in metrics}
        for family in text_string_to_metric_families(await page(mesh, which)):
            if family.name.startswith(("process_", "python_")) or family.name.endswith("_created"):
                continue
            kind, labels = declared[family.name + ("_total" if family.type == "counter" else "")]
            assert family.type == kind
            assert all(sample.labels.keys() - {"le"} == labels for sample in family.samples)


@pytest.mark.parametrize("which", ["admin", "indexer_admin"])
async def test_who_asks_for_openmetrics_gets_the_same_series_in_it(mesh: Stack, which: str) -> None:
    assert await say(mesh) == 200
    accept = {"accept": "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.7"}
    async with mesh.http.get(f"{mesh.ready[which]}/metrics", headers=accept) as response:
        assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        families = openmetrics(await response.text())  # type: ignore[no-untyped-call]
        other = {family.name: family for family in families}
    text = {
        family.name: family
        for family in text_string_to_metric_families(await page(mesh, which))
        if not family.name.endswith("_created")  # part of their counters in OpenMetrics
    }
    assert {name: family.type for name, family in text.items()} == {name: each.type for name, each in other.items()}
    assert {name: family.documentation for name, family in text.items()} == {
        name: family.documentation for name, family in other.items()
    }


async def test_no_name_of_a_clients_becomes_a_series(mesh: Stack) -> None:
    async def flood(number: int) -> None:
        name = f"{PLANTED}-{number}"
        headers = {OBJECTIVE: name, "x-request-id": name, "authorization": f"Bearer {name}"}
        await say(mesh, tenant=name, headers=headers)
        await say(mesh, model=name, tenant=f"{name}\u00e9")
        await mesh.send("GET", f"/{name}?{name}", headers={"user-agent": name})

    await flood(0)
    sizes = []
    for round_ in range(2):
        async with asyncio.TaskGroup() as tasks:
            for number in range(25):
                tasks.create_task(flood(25 * round_ + number), name=f"flood {number}")
        sizes.append((await page(mesh, "admin")).count("\n"))
    text = await page(mesh, "admin") + await page(mesh, "indexer_admin")
    assert PLANTED not in text
    assert sizes[1] - sizes[0] < 40  # a status, a reason: some words come late, no name does


async def test_the_indexer_shows_redis_and_how_late_events_are(mesh: Stack) -> None:
    assert await say(mesh) == 200

    async def counted() -> str:
        return await page(mesh, "indexer_admin")

    text = await eventually(counted, lambda text: bool(series(text, "kvmesh_indexer_redis_keys")))
    assert series(text, "kvmesh_indexer_redis_memory_bytes")[()] > 100_000
    assert series(text, "kvmesh_indexer_redis_round_trip_seconds_count")[()] >= 1
    assert series(text, "kvmesh_indexer_event_lag_seconds_count")[()] >= 1
    assert series(text, "kvmesh_indexer_ready") == {(): 1.0}
    assert series(text, "process_cpu_seconds_total")[()] > 0

"""Promises in a running mesh: slow pods miss the targets of a class, a quick one meets them, streamed or not."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.stack import Stack, eventually, running_stack, simulated_pods
from tests.integration.overload_pods import held_pods

CHAT = "/v1/chat/completions"
OBJECTIVE, TENANT = "x-gateway-inference-objective", "x-gateway-inference-fairness-id"
# far from what either pod does, on a busy machine, too
TARGETS = {"ttftSeconds": 2, "interTokenSeconds": 0.1}
POLICY: dict[str, Any] = {
    "priorities": {
        "trustObjective": True,
        "classes": [
            {"name": "standard"} | TARGETS,
            {"name": "patient", "ttftSeconds": 60, "interTokenSeconds": 5, "attainment": 0.5},
        ],
    },
    "quotas": [{"tenant": "acme", "requestsPerMinute": 1000}],
}
QUICK = ("--model", "quick", "--inter-token-ms", "1", "--prefill-tokens-per-second", "100000")
LATE = ("--model", "late", "--inter-token-ms", "1", "--prefill-tokens-per-second", "25")
SLOW = ("--model", "slow", "--inter-token-ms", "300", "--prefill-tokens-per-second", "100000")


@asynccontextmanager
async def mesh(tmp_path: Path, *flags: str) -> AsyncIterator[Stack]:
    """One pod for each of the models quick, late and slow."""
    served = [{"name": name, "tokens": "text"} for name in ("quick", "late", "slow")]
    settings = json.dumps({"sample_share": 1.0, "policy": POLICY | {"models": {"served": served}}})
    async with (
        simulated_pods(1, *QUICK) as quick,
        simulated_pods(1, *LATE) as late,
        simulated_pods(1, *SLOW) as slow,
        running_stack(tmp_path, *flags, settings=settings, endpoints=[*quick, *late, *slow]) as stack,
    ):
        yield stack


async def say(stack: Stack, model: str, *, headers: dict[str, str] | None = None, **fields: Any) -> None:
    """Have a chat; its prompt has some 100 tokens, which the late pod computes for four seconds."""
    content = f"{model} {fields} " + " ".join(f"word{number}" for number in range(40))
    body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": content}], **fields}
    answer = await stack.send("POST", CHAT, json=body, headers=headers)
    assert answer.status == 200, answer


async def say_three_ways(stack: Stack, model: str) -> None:
    await say(stack, model, stream=True)
    await say(stack, model, stream=True, stream_options={"include_usage": True})
    await say(stack, model, max_tokens=2 if model == "slow" else 8)


async def counted(stack: Stack, *labels: str, name: str = "kvmesh_slo_requests_total") -> dict[tuple[str, ...], float]:
    """The values of one of the picker's metrics by these labels, but for what is 0."""
    async with stack.http.get(f"{stack.ready['admin']}/metrics") as response:
        page = await response.text()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and sample.value:
                key = tuple(sample.labels[label] for label in labels)
                found[key] = found.get(key, 0.0) + sample.value
    return found


async def judged(stack: Stack, number: int) -> None:
    await eventually(
        lambda: counted(stack, name="kvmesh_slo_judged_requests_total"), lambda found: sum(found.values()) == number
    )


@pytest.mark.parametrize("body_mode", ["duplex", "buffered"])
async def test_a_slow_pod_misses_what_a_quick_one_meets(body_mode: str, tmp_path: Path) -> None:
    async with mesh(tmp_path, f"--body-mode={body_mode}") as stack:
        async with asyncio.TaskGroup() as tasks:
            for model in ("quick", "late", "slow"):
                tasks.create_task(say_three_ways(stack, model))
        await judged(stack, 9)
        assert await counted(stack, "class", "tenant", "model", "role", "target", "promise", "outcome") == {
            ("standard", "none", *about): value
            for about, value in {
                ("quick", "both", "ttft", "class", "met"): 2,
                ("quick", "both", "inter-token", "class", "met"): 2,
                ("quick", "both", "all", "class", "met"): 3,
                ("late", "both", "ttft", "class", "late"): 2,
                ("late", "both", "inter-token", "class", "met"): 2,
                ("late", "both", "all", "class", "late"): 3,  # at once: 4 s, of 2 + 7 x 0.1
                ("slow", "both", "ttft", "class", "met"): 2,
                ("slow", "both", "inter-token", "class", "late"): 2,
                ("slow", "both", "all", "class", "late"): 2,
                ("slow", "both", "all", "class", "met"): 1,  # at once: two tokens, 0.6 s of 2 + 0.1
            }.items()
        }
        state = await stack.state()
        (standard,) = (line for line in state["classes"] if line["class"] == "standard")
        assert (standard["judged"], standard["attainment"]) == (9, pytest.approx(4 / 9))
        explained = await stack.explain({"model": "quick", "messages": [{"role": "user", "content": "hi"}]}, path=CHAT)
        assert explained["admission"]["attainment"] == pytest.approx(4 / 9)


async def test_a_header_tightens_what_one_request_is_judged_by_and_no_figure_of_its_class(tmp_path: Path) -> None:
    async with mesh(tmp_path) as stack:
        patient = {OBJECTIVE: "patient", TENANT: "acme"}
        await say(stack, "late", stream=True, headers=patient | {"x-llm-d-slo-ttft-ms": "1000"})
        await say(stack, "quick", stream=True, headers=patient | {"x-kvmesh-ttft-ms": "20000", "x-slo-tpot-ms": "900"})
        await say(stack, "slow", headers=patient | {"x-slo-ttft-ms": "100", "x-slo-tpot-ms": "10"})
        await say(stack, "quick", stream=True, headers=patient | {"x-slo-ttft-ms": "99999999", "x-slo-tpot-ms": "-1"})
        await judged(stack, 4)
        assert await counted(stack, "class", "tenant", "model", "target", "promise", "outcome") == {
            ("patient", "acme", *about): value
            for about, value in {
                ("late", "ttft", "class", "met"): 1,
                ("late", "inter-token", "class", "met"): 1,
                ("late", "all", "class", "met"): 1,
                ("late", "ttft", "request", "late"): 1,
                ("late", "inter-token", "request", "met"): 1,
                ("late", "all", "request", "late"): 1,
                ("quick", "ttft", "class", "met"): 2,
                ("quick", "inter-token", "class", "met"): 2,
                ("quick", "all", "class", "met"): 2,
                ("quick", "ttft", "request", "met"): 1,
                ("quick", "inter-token", "request", "met"): 1,
                ("quick", "all", "request", "met"): 1,
                ("slow", "all", "class", "met"): 1,
                ("slow", "all", "request", "late"): 1,
            }.items()
        }
        assert await counted(stack, "why", name="kvmesh_ignored_slo_headers_total") == {
            ("looser",): 1,
            ("unreadable",): 1,
        }
        decisions = (await stack.state())["decisions"]
        notes = [note for decision in decisions for note in decision["notes"] if "ignored" in note]
        assert sorted(notes) == [
            "the header x-slo-tpot-ms is ignored: '-1' is no number of milliseconds above 0",
            "the header x-slo-ttft-ms is ignored: the class is promised 60000 ms, which it may only tighten",
        ]


async def test_the_pods_histograms_are_counted_beside_the_sample_with_their_bounds(tmp_path: Path) -> None:
    async with mesh(tmp_path) as stack:
        for _ in range(2):  # what a pod shows at first is not counted
            await say(stack, "slow", stream=True)
            await eventually(
                lambda: counted(stack, "model", name="kvmesh_ttft_seconds_count"), lambda found: ("slow",) in found
            )
        labels = ("class", "model", "target", "bound")
        within = await counted(stack, *labels, name="kvmesh_slo_pod_observations_within_total")
        observed = await counted(stack, *labels[:3], name="kvmesh_slo_pod_observations_total")
        assert within["standard", "slow", "ttft", "least"] == observed["standard", "slow", "ttft"] > 0
        assert ("standard", "slow", "inter-token", "most") not in within
        assert observed["standard", "slow", "inter-token"] > 0


async def test_refusals_and_failures_are_missed_one_by_one_whatever_the_sample(tmp_path: Path) -> None:
    settings = json.dumps({"sample_share": 0.000001, "policy": POLICY})
    async with (
        held_pods(1) as pods,
        running_stack(
            tmp_path, "--model", pods[0].models[0], settings=settings, endpoints=[pod.address for pod in pods]
        ) as stack,
    ):
        pods[0].release()
        body = {"model": pods[0].models[0], "messages": [{"role": "user", "content": "hi"}], "stream": True}
        assert (await stack.send("POST", CHAT, json=body)).status == 200
        await pods[0].stop()
        refused = await stack.send("POST", CHAT, json=body)
        assert refused.status == 503
        outcomes = await eventually(lambda: counted(stack, "target", "outcome"), bool)
        assert set(outcomes) <= {("all", "failed"), ("all", "refused")}
        assert sum(outcomes.values()) == 1
        assert await counted(stack, "class", name="kvmesh_slo_promised_requests_total") == {("standard",): 2}

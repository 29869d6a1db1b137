"""`kvmesh policy explain`: who says what, and over whom."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from extproc.errors import KvmeshError
from extproc.policy.model_tokens import ModelTokens
from extproc.reach.mesh_policy import PolicyTargetError
from extproc.reach.view import first_snapshot, render, render_overview
from kvmesh.documents.documents import Snapshot
from operate.policy.commands import app
from tests.unit.extproc_reach.mesh_documents import (
    Mesh,
    gateway,
    inference_policy,
    inference_pool,
    objective,
    pod,
    route,
)

MESH = inference_policy("istio-system/mesh", {"scoring": {"strategy": "kv-aware", "weights": {"session": 2}}})
OWN = inference_policy("a/own", {"scoring": {"strategy": "prefix-aware"}}, generation=4, day=2, InferencePool="llama")
POOL, POD = inference_pool("a/llama", hosts="llm.example.com"), pod("a/one", app="llama", ip="10.0.0.1")


def explained(mesh: Mesh, target: str | None) -> list[str]:
    return [pool["pool"] for pool in mesh.policy.explain(target)["pools"]]


def test_each_field_has_its_value_its_policy_and_those_it_has_displaced() -> None:
    mesh = Mesh()
    mesh.update(POOL, POD, MESH, OWN)
    assert mesh.policy.explain("a/llama") == {
        "target": "a/llama",
        "pools": [
            {
                "pool": "a/llama",
                "kind": "InferencePool",
                "endpoints": 1,
                "ready_endpoints": 1,
                "hosts": ["llm.example.com"],
                "policies": [
                    {
                        "policy": "istio-system/mesh",
                        "level": "mesh",
                        "generation": 1,
                        "created_at": "2026-01-01T00:00:00Z",
                        "accepted": True,
                        "message": "the policy is valid, and what it names is there",
                    },
                    {
                        "policy": "a/own",
                        "level": "pool",
                        "generation": 4,
                        "created_at": "2026-01-02T00:00:00Z",
                        "accepted": True,
                        "message": "the policy is valid, and what it names is there",
                    },
                ],
                "fields": [
                    {
                        "path": "spec.scoring.strategy",
                        "value": "prefix-aware",
                        "policy": "a/own",
                        "level": "pool",
                        "over": [{"policy": "istio-system/mesh", "level": "mesh", "value": "kv-aware"}],
                    },
                    {
                        "path": "spec.scoring.weights.session",
                        "value": None,
                        "policy": "a/own",
                        "level": "pool",
                        "over": [{"policy": "istio-system/mesh", "level": "mesh", "value": 2.0}],
                    },
                ],
                "not_in_force": [],
                "warnings": [],
                "tokens": [],
            }
        ],
        "problems": [],
    }


def test_the_profile_of_the_strongest_policy_is_the_origin_of_the_fields_that_no_policy_gives() -> None:
    mesh = Mesh()
    wide = inference_policy("istio-system/wide", {"profile": "conversation", "disaggregation": {"enabled": False}})
    own = inference_policy("a/own", {"profile": "analysis"}, day=2, InferencePool="llama")
    mesh.update(POOL, POD, wide, own)
    [pool] = mesh.policy.explain("a/llama")["pools"]
    assert [(field["path"], field["value"], field["policy"], field["level"]) for field in pool["fields"]] == [
        ("spec.disaggregation.enabled", False, "istio-system/wide", "mesh"),
        ("spec.priorities.classes[standard].targets", "mlperf-llama3.1-405b", "profile analysis", "profile"),
        ("spec.priorities.classes[standard].tolerance", "minutes", "profile analysis", "profile"),
        ("spec.profile", "analysis", "a/own", "pool"),
    ]
    assert pool["fields"][0]["over"] == [{"policy": "profile analysis", "level": "profile", "value": True}]
    assert [each["policy"] for each in pool["policies"]] == ["istio-system/wide", "a/own"]


def test_what_objectives_add_is_explained_as_an_extension() -> None:
    mesh = Mesh()
    mesh.update(POOL, objective("a/chat", pool="llama", priority=200))
    [pool] = mesh.policy.explain("a/llama")["pools"]
    assert pool["fields"] == [
        {
            "path": "spec.priorities.objectives[chat]",
            "value": "critical",
            "policy": "InferenceObjective a/chat",
            "level": "extension",
            "over": [],
        }
    ]


def test_a_target_may_be_a_pool_a_route_a_gateway_a_policy_or_a_namespace() -> None:
    mesh = Mesh()
    mesh.put(POOL, inference_pool("a/qwen"), inference_pool("b/llama"), gateway("infra/public"), MESH, OWN)
    mesh.update(route("a/through", to="a/llama", via="infra/public"))
    assert explained(mesh, "a/llama") == ["a/llama"]
    assert explained(mesh, "a") == ["a/llama", "a/qwen"]
    assert explained(mesh, "InferencePool/b/llama") == ["b/llama"]
    assert explained(mesh, "httproute/a/through") == explained(mesh, "gateway/infra/public") == ["a/llama"]
    assert explained(mesh, "infpol/a/own") == ["a/llama"]
    assert explained(mesh, "inferencepolicies/istio-system/mesh") == explained(mesh, None)
    assert explained(mesh, None) == ["a/llama", "a/qwen", "b/llama"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("a/lama", "there is no pool 'a/lama'; the nearest is 'a/llama'"),
        ("x", "there is no namespace with a pool 'x'; the nearest is 'a'"),
        ("HTTPRoute/a/x", "there is no HTTPRoute 'a/x'; there is none at all"),
        ("Pod/a/x", "'Pod/a/x': the kind must be one of Gateway, HTTPRoute, InferencePool, Service, InferencePolicy"),
        ("a/b/c/d", "'a/b/c/d' is neither namespace/name, Kind/namespace/name nor a namespace"),
    ],
)
def test_a_target_that_is_not_there_is_refused_with_the_nearest(target: str, words: str) -> None:
    mesh = Mesh()
    mesh.update(POOL)
    with pytest.raises(PolicyTargetError) as refused:
        mesh.policy.explain(target)
    assert str(refused.value) == words


def test_the_overview_has_every_pool_and_what_each_status_says() -> None:
    mesh = Mesh()
    mesh.update(POOL, MESH, inference_policy("b/lost", {"scoring": {"fallbacks": 1}}, InferencePool="gone"))
    answer = mesh.policy.explain(None)
    assert [(each["policy"], each["covers"], each["conditions"][0]["reason"]) for each in answer["policies"]] == [
        ("b/lost", [], "TargetNotFound"),
        ("istio-system/mesh", ["a/llama"], "Accepted"),
    ]
    assert [problem["where"] for problem in answer["problems"]] == ["InferencePolicy b/lost"]
    assert mesh.policy.explain("a/llama")["problems"] == []  # of other namespaces


def test_explaining_reads_only_the_last_state() -> None:
    mesh = Mesh()
    mesh.update(POOL, OWN)
    before = mesh.policy.explain("a/llama")
    mesh.policy._settled = None  # as in the middle of an update in another thread
    assert mesh.policy.explain("a/llama") == before


# --- the commands -----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["policy", *arguments])
    return result.exit_code, result.output


def folder_with(path: Path, *documents: Any) -> Path:
    (path / "all.yaml").write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    return path


def test_a_folder_is_explained_without_any_picker(tmp_path: Path) -> None:
    code, shown = run("explain", "a/llama", "--policies", str(folder_with(tmp_path, POOL, POD, MESH, OWN)))
    assert code == 0, shown
    lines = [line.split() for line in shown.splitlines()]
    assert shown.startswith("InferencePool a/llama: 1 of 1 endpoints ready, hosts llm.example.com\n")
    assert ["mesh", "istio-system/mesh", "(generation", "1)"] in lines
    assert ["scoring.strategy", "prefix-aware", "a/own", "pool"] in lines
    assert ["over", "kv-aware", "istio-system/mesh", "mesh"] in lines
    assert ["scoring.weights.session", "(taken", "out)", "a/own", "pool"] in lines


def test_json_is_what_the_picker_would_answer(tmp_path: Path) -> None:
    code, shown = run(
        "explain", "a/llama", "-o", "json", "--policies", str(folder_with(tmp_path, POOL, POD, MESH, OWN))
    )
    mesh = Mesh()
    mesh.update(POOL, POD, MESH, OWN)
    assert (code, msgspec.json.decode(shown)) == (0, mesh.policy.explain("a/llama"))


SERVED = {"models": {"served": [{"name": "m"}, {"name": "t", "tokens": "text"}]}}


def test_a_folder_says_that_nobody_has_seen_the_models_tokens(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, POOL, POD, inference_policy("a/own", SERVED))
    code, shown = run("explain", "a/llama", "--policies", str(folder))
    assert code == 0
    assert "tokens of m: unverified: its pods are to be asked" in shown
    assert "tokens of t: unverified: it is to be routed on its text (`tokens: text`), which only predicts: " in shown
    _, shown = run("explain", "--policies", str(folder))
    assert ["a/llama", "1/1", "unverified", "a/own"] in [line.split() for line in shown.splitlines()]


def test_what_a_picker_has_seen_of_tokens_is_shown_line_by_line_and_in_short() -> None:
    mesh = Mesh()
    mesh.update(POOL, POD, inference_policy("a/own", SERVED))
    wrong = ModelTokens(model="m", wanted="auto", seen="text", reason="text-only", message="m: only text: do this")
    tokens = {"a/llama": (wrong, ModelTokens(model="t", wanted="auto", seen="pods"))}
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        render(mesh.policy.explain("a/llama", tokens=tokens), console=console)
        render_overview(mesh.policy.explain(None, tokens=tokens), console=console)
    lines = [line.strip() for line in capture.get().splitlines()]
    assert {"WARNING text-only: m: only text: do this", "tokens of t: from its pods"} <= set(lines)
    assert any(line.split()[:3] == ["a/llama", "1/1", "TEXT-ONLY"] and "(1 of 2 models)" in line for line in lines)


def test_what_is_not_in_force_ends_with_exit_code_1_and_is_named(tmp_path: Path) -> None:
    bad = inference_policy("a/bad", {"scoring": {"fallback": 1}})
    code, shown = run("explain", "--policies", str(folder_with(tmp_path, POOL, bad)))
    assert code == 1
    assert "spec.scoring.fallback: unknown field; the nearest valid one is 'fallbacks'" in shown
    code, shown = run("explain", "a/none", "--policies", str(tmp_path))
    assert (code, "there is no pool 'a/none'" in shown) == (1, True)


def test_nothing_from_documents_is_shown_as_markup_or_control_characters(tmp_path: Path) -> None:
    odd = inference_policy("a/odd", {"priorities": {"tenants": {"claim": "[red]\x1b[31m"}}})
    code, shown = run("explain", "a/llama", "--policies", str(folder_with(tmp_path, POOL, odd)))
    assert "\x1b" not in shown
    assert "[red]" in shown
    assert code == 0


# --- the first snapshot of a source -----------------------------------------------------------------------------------


class Source:
    """Gives these snapshots and then rests, or ends."""

    def __init__(self, *snapshots: Snapshot, ends: Exception | None = None) -> None:
        self.snapshots, self.ends, self.is_over = snapshots, ends, False

    async def run(self, on_change: Callable[[Snapshot], None]) -> None:
        try:
            for snapshot in self.snapshots:
                on_change(snapshot)
            if self.ends is not None:
                raise self.ends
            await asyncio.Event().wait()
        finally:
            self.is_over = True


async def test_the_first_synced_snapshot_is_taken_and_the_source_ended() -> None:
    early, first, second = (Snapshot(documents={}, synced=synced) for synced in (False, True, True))
    source = Source(early, first, second)
    assert await first_snapshot(source, timeout_seconds=5) is first
    assert source.is_over


async def test_a_source_that_says_nothing_or_fails_ends_with_its_words() -> None:
    with pytest.raises(KvmeshError, match=r"not all read within 0\.01 s"):
        await first_snapshot(Source(), timeout_seconds=0.01)
    with pytest.raises(ValueError, match="no configuration"):
        await first_snapshot(Source(ends=ValueError("no configuration")), timeout_seconds=5)

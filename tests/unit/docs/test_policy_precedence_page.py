"""docs/reference/policy-precedence.md shows what its example comes to, and has every level and condition."""

import re
from datetime import UTC, datetime
from pathlib import Path

import yaml
from rich.console import Console

from extproc.policy.merge import Level
from extproc.reach.mesh_policy import MeshPolicy
from extproc.reach.status import TYPES
from extproc.reach.view import render
from kvmesh.documents.documents import Snapshot
from tests.unit.extproc_reach.mesh_documents import inference_pool, pod

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "policy-precedence.md").read_text(encoding="utf-8")


def test_the_table_of_levels_is_in_their_order() -> None:
    rows = [row.split("`")[1] for row in PAGE.partition("## How several")[0].splitlines() if row.startswith("| `")]
    assert rows == [level.name.lower() for level in sorted(Level)]


def test_every_condition_is_explained() -> None:
    rows = [row.split("`")[1] for row in PAGE.partition("## Status")[2].splitlines() if row.startswith("| `")]
    assert rows == list(TYPES)


def test_the_example_is_explained_as_the_page_shows() -> None:
    policies = list(yaml.safe_load_all(PAGE.partition("```yaml\n")[2].partition("```")[0]))
    for policy in policies:
        policy["metadata"]["generation"] = 1
    documents = {
        "InferencePolicy": tuple(policies),
        "InferencePool": (inference_pool("team-a/llama"),),
        "Pod": tuple(pod(f"team-a/{i}", app="llama", ip=f"10.0.0.{i}") for i in (1, 2)),
    }
    mesh = MeshPolicy()
    mesh.update(Snapshot(documents=documents, synced=True), now=datetime(2026, 1, 1, tzinfo=UTC))
    shown = PAGE.partition("then shows:\n\n```text\n")[2].partition("```")[0]
    assert _words(_rendered(mesh)) == _words(shown)


def _rendered(mesh: MeshPolicy) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        render(mesh.explain("team-a/llama"), console=console)
    return capture.get()


def _words(text: str) -> list[list[str]]:
    return [re.split(r"\s+", line.strip()) for line in text.splitlines() if line.strip()]

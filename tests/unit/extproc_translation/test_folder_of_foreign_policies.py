"""Policies of other systems in a `--policies` folder, next to a pool: in force as published."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from operate.policy.commands import app
from tests.unit.extproc_reach.mesh_documents import inference_pool
from tests.unit.extproc_translation.foreign_policies import FOLDER


def explained(folder: Path, *names: str, pool: str = "default/llama") -> dict[str, Any]:
    """Return the fields of the pool's merged policy if the folder has these published files."""
    for name in names:
        (folder / f"{name}.yaml").write_bytes((FOLDER / f"{name}.yaml").read_bytes())
    (folder / "pool.yaml").write_text(yaml.safe_dump(inference_pool(pool)), encoding="utf-8")
    shown = CliRunner().invoke(app, ["policy", "explain", pool, "-o", "json", "--policies", str(folder)])
    answer = json.loads(shown.stdout)
    assert (shown.exit_code, answer["problems"]) == (0, [])
    return {field["path"]: (field["value"], field["policy"]) for field in answer["pools"][0]["fields"]}


@pytest.mark.parametrize(
    ("name", "policy", "field", "value"),
    [
        ("planner", "default/planner", "spec.autoscale.decode.scaleUp.kvUsage", 0.75),
        ("disaggregated_router", "default/disaggregated-router", "spec.disaggregation.rule", "votes"),
        ("llm_d_prefill_decode", "default/llm-d-prefill-decode", "spec.disaggregation.promptTokens", 16),
        ("llm_d_precise_prefix", "default/llm-d-precise-prefix", "spec.scoring.weights.prefix", 2.0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_published_file_is_in_force(name: str, policy: str, field: str, value: object, tmp_path: Path) -> None:
    assert explained(tmp_path, name)[field] == (value, policy)


def test_published_objectives_are_in_force(tmp_path: Path) -> None:
    fields = explained(tmp_path, "llm_d_objectives", pool="default/vllm-qwen3-32b")
    assert fields == {
        f"spec.priorities.objectives[{name}]": ("standard", f"InferenceObjective default/{name}")
        for name in ("small-segment-lora", "base-model", "base-model-cpu")
    }


def test_the_namespace_of_a_file_is_that_of_its_metadata(tmp_path: Path) -> None:
    theirs = {"metadata": {"name": "own", "namespace": "llm"}, "qos": {"low_priority_threshold_ms": 500}}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(theirs), encoding="utf-8")
    fields = explained(tmp_path, pool="llm/llama")
    assert fields == {"spec.priorities.classes[sheddable].ttftSeconds": (0.5, "llm/own")}

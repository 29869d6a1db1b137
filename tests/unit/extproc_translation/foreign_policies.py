"""Policies of other systems for tests: published files, and the policy of a picker that gets a translated one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from extproc.policy.values import PickPolicy
from extproc.translation.translated import translated
from extproc.translation.translation import Note
from tests.unit.extproc_reach.mesh_documents import Mesh, inference_pool

FOLDER = Path(__file__).parents[2] / "data" / "foreign_policies"


def published(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def spec_of(value: Mapping[str, Any]) -> dict[str, Any]:
    document, _ = translated(value, name="theirs")
    spec: dict[str, Any] = document["spec"]
    return spec


def notes_of(value: Mapping[str, Any]) -> dict[str, Note]:
    _, translation = translated(value, name="theirs")
    return {note.key: note for note in translation.notes}


def policy_of(value: Mapping[str, Any]) -> PickPolicy:
    """Return the policy in force at a pool of the same namespace."""
    document, _ = translated(value, name="theirs")
    state = Mesh().update(inference_pool("default/llama"), document)
    assert not state.problems
    return state.configs["default/llama"].policy

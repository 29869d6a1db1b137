"""`kvmesh policy explain --resource`: the merged policy as one document, which comes to the same when it is applied."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from extproc.policy.inference_policy import read_spec
from extproc.policy.resource import resource_text, written_spec
from extproc.policy.values import PoolConfig
from extproc.reach.view import resources_of
from kvmesh.documents.documents import Document
from operate.policy.commands import app
from tests.unit.extproc_policy.policy_documents import WHOLE
from tests.unit.extproc_reach.mesh_documents import (
    Mesh,
    inference_policy,
    inference_pool,
    model_rewrite,
    objective,
    pod,
    service,
)

POOL, POD = inference_pool("a/llama", hosts="llm.example.com"), pod("a/one", app="llama", ip="10.0.0.1")
MESH = inference_policy(
    "istio-system/mesh",
    {
        "scoring": {"strategy": "kv-aware", "weights": {"session": 2}},
        "priorities": {"classes": [{"name": "chat", "priority": 7, "ttftSeconds": 2.5}, {"name": "rag"}]},
        "models": {"served": [{"name": "org/llama", "chatTemplateKwargs": [{"name": "think", "value": "false"}]}]},
    },
)
OWN = inference_policy(
    "a/own",
    {
        "scoring": {"strategy": "prefix-aware"},
        "priorities": {
            "classes": [{"name": "chat", "ttftSeconds": 1}],
            "rules": [{"priorityClass": "chat", "headers": [{"name": "x-plan", "value": "gold"}]}],
        },
        "models": {"rules": [{"model": "small", "targets": [{"model": "org/llama"}]}]},
        "quotas": [{"tenant": "acme: #1", "requestsPerMinute": 5}],
    },
    day=2,
    InferencePool="llama",
)
WHOLE_THERE = {**WHOLE, "metadata": {**WHOLE["metadata"], "namespace": "a"}}
EXTENSIONS = (
    objective("a/nightly", pool="llama", priority=-50),
    model_rewrite(
        "a/rewrite",
        pool="llama",
        rules=[
            {
                "matches": [{"model": {"value": "org/old.v1[x]"}}],
                "targets": [{"modelRewrite": "org/llama", "weight": 3}],
            }
        ],
    ),
)


def printed(mesh: Mesh, target: str = "a/llama") -> str:
    return resources_of(mesh.policy.explain(target))


def same(config: PoolConfig) -> PoolConfig:
    """All but where it is from."""
    return replace(config, origins={})


@pytest.mark.parametrize(
    "documents",
    [
        (MESH, OWN),
        (MESH, OWN, *EXTENSIONS),
        (WHOLE_THERE,),
        (WHOLE_THERE, MESH, OWN, *EXTENSIONS),
        (MESH,),
        (),
    ],
)
def test_what_is_printed_comes_to_the_same_as_all_that_it_was_merged_of(
    documents: tuple[Document, ...],
) -> None:
    before, after = Mesh(), Mesh()
    wanted = before.update(POOL, POD, *documents).configs["a/llama"]
    document = yaml.safe_load(printed(before))
    found = after.update(POOL, POD, document).configs["a/llama"]
    assert same(found) == same(wanted)
    assert bool(found.origins) == bool(documents)
    beside = before.update(document).configs["a/llama"]  # beside the others, as most specific
    assert same(beside) == same(wanted)


def test_the_command_prints_what_can_be_applied(tmp_path: Path) -> None:
    text = yaml.safe_dump_all([POOL, POD, MESH, OWN])
    (tmp_path / "all.yaml").write_text(text, encoding="utf-8")
    arguments = ["policy", "explain", "a/llama", "--resource", "--policies", str(tmp_path)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    (document,) = yaml.safe_load_all(shown.output)
    before, after = Mesh(), Mesh()
    wanted = before.update(POOL, POD, MESH, OWN).configs["a/llama"]
    assert same(after.update(POOL, POD, document).configs["a/llama"]) == same(wanted)


def test_comments_say_where_each_field_is_from_and_what_it_is_over() -> None:
    mesh = Mesh()
    mesh.update(POOL, POD, MESH, OWN, *EXTENSIONS)
    lines = printed(mesh).splitlines()
    assert lines[0] == "# What holds at InferencePool a/llama, merged of istio-system/mesh, a/own"
    assert "    strategy: prefix-aware  # a/own, pool, over istio-system/mesh (kv-aware)" in lines
    assert "    - name: chat" in lines
    assert "      ttftSeconds: 1  # a/own, pool, over istio-system/mesh (2.5)" in lines
    assert any("nightly" in line and "InferenceObjective a/nightly" in line for line in lines), lines
    assert not any("session" in line for line in lines)  # taken out by the other strategy


def test_a_service_and_a_pool_that_nothing_is_said_of_are_printed_too() -> None:
    mesh = Mesh()
    mesh.update(service("a/plain"), pod("a/two", app="plain", ip="10.0.0.2"))
    document = yaml.safe_load(printed(mesh, "a/plain"))
    assert document["spec"]["targetRefs"] == [{"group": "", "kind": "Service", "name": "plain"}]
    assert document["metadata"] == {"name": "plain", "namespace": "a"}


def test_a_whole_spec_is_written_as_it_was_read() -> None:
    fields: Mapping[str, Any] = read_spec(WHOLE["spec"])
    assert read_spec(yaml.safe_load(resource_text(written_spec(fields), name="x"))["spec"]) == fields


def test_a_text_from_a_document_cannot_leave_its_comment() -> None:
    text = resource_text({"failureMode": "FailOpen"}, name="x", words={"spec.failureMode": "a\nkind: Evil\u2028b"})
    assert yaml.safe_load(text)["kind"] == "InferencePolicy"
    assert len(text.splitlines()) == 5

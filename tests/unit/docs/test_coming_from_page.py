"""docs/start/coming-from.md: what it names on our side is there, and what it says is not read is not."""

import re
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from extproc.admission.asked_request import PRIORITY_HEADER
from extproc.ext_proc.answers import (
    DESTINATION_HEADER,
    FURTHER_HEADERS,
    SERVED_KEY,
    SUBSET_KEY,
    wanted_headers,
)
from extproc.ext_proc.refusals import REASON_HEADER
from extproc.ledger import metrics as picker
from extproc.policy.inference_extension import GROUPS, read_model_rewrite, read_objective
from extproc.policy.inference_policy import parse_inference_policy
from extproc.policy.priority import FAIRNESS_HEADER
from extproc.reach.mesh_policy import ROLE_LABELS
from extproc.reach.warnings import warnings
from kv_indexer.telemetry import metrics as indexer
from kvmesh.documents.document_kinds import MESH_KINDS
from kvmesh.documents.pools import POOL_LABEL
from operate.cli import build
from operate.policy.check import Source, check_lines, check_sources
from tests.unit.extproc_translation.foreign_policies import FOLDER
from tools.docs_site import DOCS
from tools.policy_crd import policy_schema
from tools.reference import commands, options

TEXT = (DOCS / "start" / "coming-from.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for table in re.findall(r"^\| theirs \|.*\n(?:\|.*\n)+", TEXT, re.MULTILINE)
    for line in table.splitlines()[2:]
]
METRICS = {each.name for each in (*picker.METRICS, *indexer.METRICS)}
HEADERS = {
    *wanted_headers(),
    FAIRNESS_HEADER,
    DESTINATION_HEADER,
    SUBSET_KEY,
    SERVED_KEY,
    REASON_HEADER,
    PRIORITY_HEADER,
}
COMMANDS = dict(commands(build()))
FLAGS = {
    flag.strip()
    for words, command in COMMANDS.items()
    for each in options(words, command)
    for flag in re.findall(r"--[a-z0-9-]+", each.flags)
}
RESOURCES = {kind.kind for kind in MESH_KINDS}


def fields(schema: dict[str, Any], path: str = "") -> set[str]:
    """Return the path of every field of a policy, lists of named entries with []."""
    found = {path} if path else set()
    for name, inner in schema.get("properties", {}).items():
        found |= fields(inner, f"{path}.{name}" if path else name)
    if "items" in schema:
        found |= fields(schema["items"], f"{path}[]")
    return found


FIELDS = fields(policy_schema())
FIELDS |= {path.removeprefix("spec.") for path in FIELDS}


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_there(name: str) -> bool:
    if name.startswith("--"):
        return name in FLAGS
    if name.startswith("kvmesh "):
        return name in COMMANDS
    if name.startswith("kvmesh_"):
        return name.partition("{")[0] in METRICS
    if name.startswith("x-"):
        return name in HEADERS
    if "/" in name:
        return name in {POOL_LABEL, *ROLE_LABELS}
    return name in FIELDS


def test_the_tables_are_found() -> None:
    assert len(ROWS) > 80


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_stands_for_theirs_is_in_the_code(row: list[str]) -> None:
    _, ours, _ = row
    if ours == "nothing":
        return
    names = code(ours)
    assert names or ours in RESOURCES, ours
    assert [name for name in names if not is_there(name)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_remarks_name_what_is_in_the_code(row: list[str]) -> None:
    ours = [
        name
        for name in code(row[2])
        if re.match(
            r"--(?!prefill-model)|kvmesh[_ .]|(scoring|load|models|priorities|disaggregation|prefixCache)\.", name
        )
    ]
    assert [name for name in ours if not is_there(name)] == []


@pytest.mark.parametrize("row", [row for row in ROWS if row[1] == "nothing"], ids=lambda row: row[0])
def test_what_is_not_read_is_not(row: list[str]) -> None:
    theirs = {name.lower() for name in code(row[0]) if name.startswith("x-")}
    assert not theirs & HEADERS
    assert row[2]  # because


def test_older_and_newer_headers_are_read_as_the_table_says() -> None:
    assert "x-gateway-inference-objective" in wanted_headers()
    assert "x-llm-d-inference-objective" not in wanted_headers()
    assert {"x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-session-id"} <= FURTHER_HEADERS


def test_objectives_and_rewrites_of_both_groups_are_read() -> None:
    assert GROUPS == ("llm-d.ai", "inference.networking.x-k8s.io")
    for group in GROUPS:
        head = {"apiVersion": f"{group}/v1alpha2", "metadata": {"name": "a", "namespace": "llm"}}
        reference = {"name": "vllm-llama"}
        objective = {**head, "kind": "InferenceObjective", "spec": {"poolRef": reference, "priority": 1}}
        assert read_objective(objective).pools == ("llm/vllm-llama",)
        rules = [{"targets": [{"modelRewrite": "b"}]}]
        rewrite = {**head, "kind": "InferenceModelRewrite", "spec": {"poolRef": reference, "rules": rules}}
        assert read_model_rewrite(rewrite).pool == "llm/vllm-llama"


def test_pools_are_read_in_version_1_alone() -> None:
    pools = {kind.api_version for kind in MESH_KINDS if kind.kind == "InferencePool"}
    assert pools == {"inference.networking.k8s.io/v1"}


def test_the_policy_is_read_and_nothing_of_it_is_doubtful() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert not warnings(parse_inference_policy(yaml.safe_load(text)))


def test_a_translation_is_printed_as_the_page_shows_it() -> None:
    _, _, text = (FOLDER / "llm_d_prefill_decode.yaml").read_bytes().partition(b"\n")  # without the line of its source
    source = Source("pd-epp-config.yaml", text)
    found = check_sources([source], root_namespace="istio-system", now=datetime(2026, 1, 1, tzinfo=UTC))
    (shown,) = re.findall(r"^```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert shown.splitlines() == list(check_lines(found))


def test_the_commands_of_the_steps_are_there_with_their_flags() -> None:
    text = TEXT.partition("## Steps")[2].replace("\\\n", " ")
    lines = re.findall(r"(kvmesh (?!picker)[a-z][^\n`|]*)", text)
    assert len(lines) >= 6
    for line in lines:
        words = next(known for known in sorted(COMMANDS, key=len, reverse=True) if line.startswith(known))
        known = {flag for each in options(words, COMMANDS[words]) for flag in re.findall(r"--[a-z0-9-]+", each.flags)}
        assert set(re.findall(r"--[a-z0-9-]+", line)) <= known, line

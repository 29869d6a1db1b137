"""`kvmesh policy check`: the forms of a policy, the file and line of each remark, and what only all together show."""

import json
import random
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from extproc.policy.inference_policy import parse_inference_policy, read_policy_file
from extproc.policy.reading import PolicyDocumentError
from kvmesh.documents.document_files import DocumentFileError, read_documents
from operate.policy.check import ERROR, Checked, Source, check_sources, document_nodes, line_of
from operate.policy.commands import app
from tests.unit.extproc_policy.policy_documents import WHOLE, policy
from tests.unit.extproc_policy.policy_mutations import mutated
from tests.unit.extproc_reach.mesh_documents import inference_policy, inference_pool, objective, service

MESH = inference_policy("istio-system/mesh", {"scoring": {"strategy": "kv-aware", "weights": {"session": 2}}})
POOL = inference_pool("a/llama")


def check_text(file: str, text: bytes) -> list[Checked]:
    return check_sources([Source(file, text)], root_namespace="istio-system", now=datetime(2026, 1, 1, tzinfo=UTC))


def run(*arguments: str, stdin: str | None = None) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["policy", "check", *arguments], input=stdin)
    return result.exit_code, result.output.splitlines()


def write(path: Path, *documents: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False), encoding="utf-8")
    return str(path)


def test_each_document_of_each_file_is_judged_with_its_place(tmp_path: Path) -> None:
    bad = inference_policy("a/bad", {"scoring": {"weights": {"prefx": 1}}})
    doubtful = inference_policy("a/doubtful", {"load": {"overload": {"kvUsage": 0.01}}})
    file = write(tmp_path / "all.yaml", MESH, bad, doubtful, objective("a/chat", pool="llama", priority=1))
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [", encoding="utf-8")
    code, lines = run(file, str(broken))
    text = Path(file).read_text(encoding="utf-8").splitlines()
    assert code == 1
    at = {word: number for number, line in enumerate(text, 1) for word in ("prefx", "kvUsage") if word in line}
    begins = [number + 1 for number, line in enumerate(text, 1) if line == "---"]
    assert lines[:3] == [
        f"{file}:1: InferencePolicy istio-system/mesh: ok",
        f"{file}:{at['prefx']}: InferencePolicy a/bad: ERROR spec.scoring.weights.prefx: unknown field; "
        "the nearest valid one is 'prefix'; nothing of it is in force",
        f"{file}:{begins[1]}: InferencePolicy a/doubtful: ok",
    ]
    where = f"{file}:{at['kvUsage']}: InferencePolicy a/doubtful: warning spec.load.overload.kvUsage: "
    assert lines[3].startswith(where)
    assert lines[4] == f"{file}:{begins[2]}: InferenceObjective a/chat: ok"
    assert lines[5].startswith(f"{broken}:2: ERROR line 2, column 1: ")
    code, lines = run("-o", "json", file)
    shown = msgspec.json.decode("\n".join(lines))
    assert [
        (each["document"], any(found["level"] == "error" for found in each["findings"]), each["line"]) for each in shown
    ] == [
        ("InferencePolicy istio-system/mesh", False, 1),
        ("InferencePolicy a/bad", True, begins[0]),
        ("InferencePolicy a/doubtful", False, begins[1]),
        ("InferenceObjective a/chat", False, begins[2]),
    ]
    assert shown[1]["findings"][0]["path"] == "spec.scoring.weights.prefx"


@pytest.mark.parametrize("text", ["scoring: {strategy: kv-aware}", "spec:\n  scoring: {strategy: kv-aware}"])
def test_a_policy_without_its_envelope_is_taken_with_a_note_and_printed_as_a_resource(text: str) -> None:
    (checked,) = check_text("my Policy.yaml", text.encode())
    assert not checked.is_wrong
    (note,) = [remark.message for remark in checked.remarks if remark.level == "note"]
    assert "--resource" in note
    code, lines = run("--resource", "-", stdin=text)
    assert code == 0
    printed = "\n".join(line for line in lines if not line.startswith("stdin:"))
    (document,) = yaml.safe_load_all(printed)
    assert document["metadata"]["name"] == "stdin"
    assert document["spec"] == {"scoring": {"strategy": "kv-aware"}}


@pytest.mark.parametrize("text", ["classes: [{name: batch, sheddable: true}]", "served: [{name: org/llama}]"])
def test_a_section_alone_is_no_policy_here_nor_for_a_picker(text: str) -> None:
    (checked,) = check_text("my Policy.yaml", text.encode())
    assert checked.is_wrong
    with pytest.raises(PolicyDocumentError):
        read_policy_file(yaml.safe_load(text))


def test_the_line_of_a_mistake_is_right_whatever_the_form() -> None:
    for text, line in (
        ("scoring:\n  weights:\n    prefix: 1\n    prefx: 2", 4),
        ("spec:\n  quotas:\n    - {tenant: a, requestsPerMinute: 1}\n    - tenant: b\n      requestsPerMinut: 1", 5),
        ("priorities:\n  classes:\n  - name: chat\n    priority: 1\n  - name: batch\n    priorit: 2", 6),
        ("# a comment\n---\n# another\nfailureMode: Fail", 4),
    ):
        (checked,) = check_text("one.yaml", text.encode())
        assert [remark.line for remark in checked.remarks if remark.level == "error"] == [line], text


def test_paths_lead_through_names_numbers_and_quoted_keys() -> None:
    text = 'spec:\n  priorities:\n    classes:\n    - name: chat\n      ttftSeconds: 1\n  "odd key": 1\n  quotas: []\n'
    (node,) = document_nodes(text.encode())
    assert line_of(node, "spec.priorities.classes[chat].ttftSeconds") == 5
    assert line_of(node, 'spec["odd key"]') == 6
    assert line_of(node, "spec.quotas[3].tenant") == 7
    assert line_of(node, "spec.nothing") == 1


def test_what_is_neither_document_nor_policy_is_an_error_and_other_kinds_are_passed_over(
    tmp_path: Path,
) -> None:
    (checked,) = check_text("one.yaml", b"scorng: {strategy: kv-aware}")
    assert "nearest valid one is 'scoring'" in checked.remarks[0].message
    (wrong,) = check_text("one.yaml", b"apiVersion: kvmesh.io/v1\nkind: InferencePolicy\nmetadata: {name: a}\n")
    assert "apiVersion" in wrong.remarks[0].message
    (empty,) = check_text("one.yaml", b"{}")  # the default policy
    assert [remark.level for remark in empty.remarks] == ["note", "warning"]
    others = [{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}}, {"kind": "Kustomization"}]
    assert run(write(tmp_path / "others.yaml", *others)) == (0, ["no policies in these files"])


def test_a_folder_is_judged_as_a_whole(tmp_path: Path) -> None:
    first = inference_policy("a/first", {"scoring": {"weights": {"session": 1}}}, InferencePool="llama")
    second = inference_policy("a/second", {"scoring": {"weights": {"session": 2}}}, day=2, InferencePool="llama")
    lost = inference_policy("a/lost", {"scoring": {"fallbacks": 1}}, InferencePool="llma")
    reserved = {"classes": [{"name": "chat", "reservedShare": 0.7}, {"name": "rag", "reservedShare": 0.7}]}
    against = inference_policy("a/against", {"priorities": reserved}, day=3, InferencePool="llama")
    write(tmp_path / "pools.yaml", POOL)
    write(tmp_path / "policies" / "first.yaml", first)
    write(tmp_path / "policies" / "rest.yaml", second, lost, against)
    write(tmp_path / "policies" / "twice.yaml", first)
    write(tmp_path / ".hidden.yaml", inference_policy("a/hidden", {"scoring": {"weights": {"prefx": 1}}}))
    code, lines = run(str(tmp_path))
    said = [line.removeprefix(f"{tmp_path}/policies/") for line in lines]
    assert code == 1
    assert any(":" in line and "a/lost: warning InferencePool a/llma" in line for line in said), said
    assert any("a/second: warning" in line and "a/first, of the same level, decides" in line for line in said), said
    errors = [line for line in said if "ERROR" in line]
    assert [line.partition(": ERROR ")[0].rpartition(" ")[2] for line in errors] == ["a/against", "a/first"]
    assert "the reserved shares add up to 1.4" in errors[0]
    assert "first.yaml, line 1, already" in errors[1]
    assert "hidden" not in "".join(said)


def test_in_a_folder_other_things_are_doubtful_and_no_errors(tmp_path: Path) -> None:
    write(tmp_path / "values.yaml", {"image": "x", "replicas": 2, "models": {}, "pools": []})
    write(tmp_path / "list.yaml", [1, 2])
    code, lines = run(str(tmp_path))
    assert code == 0
    assert [line.partition(": ")[2].partition(" ")[0] for line in lines if "warning" in line] == ["warning", "warning"]
    assert run(str(tmp_path / "values.yaml"))[0] == 1


def test_one_file_of_a_whole_policy_comes_back_as_it_was(tmp_path: Path) -> None:
    file = write(tmp_path / "whole.yaml", WHOLE)
    code, lines = run("--resource", file)
    assert code == 0, lines
    printed = "\n".join(line for line in lines if not line.startswith(str(tmp_path)))
    again = parse_inference_policy(yaml.safe_load(printed))
    assert again.fields == parse_inference_policy(WHOLE).fields


def test_a_field_beside_the_spec_is_not_lost_in_silence(tmp_path: Path) -> None:
    file = write(tmp_path / "one.yaml", {**MESH, "scoring": {"strategy": "kv-aware"}})
    line = Path(file).read_text(encoding="utf-8").splitlines().index("scoring:") + 1
    code, lines = run(file)
    assert code == 0
    assert lines[1].startswith(f"{file}:{line}: InferencePolicy istio-system/mesh: warning scoring: unknown field")
    assert lines[1].endswith("it belongs into `spec`")


def test_without_a_pool_nothing_is_said_of_what_a_policy_reaches(tmp_path: Path) -> None:
    own = inference_policy("a/own", {"scoring": {"weights": {"session": 1}}}, InferencePool="llama")
    file = write(tmp_path / "all.yaml", own, service("a/plain", is_pool=False))
    assert run(file) == (0, [f"{file}:1: InferencePolicy a/own: ok"])
    beside = write(tmp_path / "pool.yaml", service("a/pool"))
    code, lines = run(file, beside)
    assert (code, any("warning InferencePool a/llama" in line for line in lines)) == (0, True)


def test_lists_in_lists_and_kinds_of_others_of_the_same_name_are_read(tmp_path: Path) -> None:
    knative = {"apiVersion": "serving.knative.dev/v1", "kind": "Service", "metadata": {"name": "x"}}
    bad = inference_policy("a/bad", {"scoring": {"weights": {"prefx": 1}}})
    listed = {"kind": "List", "items": [MESH, {"kind": "List", "items": [bad, knative]}]}
    file = write(tmp_path / "list.yaml", listed)
    code, lines = run(file)
    at = Path(file).read_text(encoding="utf-8").splitlines().index("          prefx: 1") + 1
    assert code == 1
    assert lines[0].endswith("InferencePolicy istio-system/mesh: ok")
    assert lines[1].startswith(f"{file}:{at}: InferencePolicy a/bad: ERROR ")
    assert len(lines) == 2


def test_a_policy_of_another_system_is_shown_key_by_key_with_its_differences(tmp_path: Path) -> None:
    theirs = {"qos": {"low_priority_threshold_ms": 500}, "model": "llama"}
    file = write(tmp_path / "Their policy.yaml", theirs)
    code, lines = run(file)
    assert (code, [re.split("  +", line) for line in lines]) == (
        0,
        [
            [f"{file}:1: InferencePolicy default/their-policy: ok"],
            ["KEY", "INFERENCEPOLICY", "DIFFERENCE"],
            [
                "qos.low_priority_threshold_ms",
                "priorities.classes[sheddable].ttftSeconds: 0.5",
                "low priority: by `priorities.rules` or an InferenceObjective",
            ],
            ["model", "-", "a policy is for pools, not for models: name the pool in `targetRefs`"],
        ],
    )
    (shown,) = msgspec.json.decode("\n".join(run("-o", "json", file)[1]))
    assert [(each["key"], each["became"]) for each in shown["translation"]] == [
        ("qos.low_priority_threshold_ms", ["priorities.classes[sheddable].ttftSeconds: 0.5"]),
        ("model", []),
    ]


def test_a_policy_of_another_system_is_printed_as_a_resource_with_its_differences(tmp_path: Path) -> None:
    metadata = {"name": "theirs", "namespace": "a"}
    theirs = {"metadata": metadata, "split_policy": {"prompt_length_threshold": 256}, "model": "llama"}
    result = CliRunner().invoke(app, ["policy", "check", "--resource", write(tmp_path / "one.yaml", theirs)])
    (document,) = yaml.safe_load_all(result.stdout)
    assert document["metadata"] == metadata
    assert document["spec"] == {"disaggregation": {"enabled": True, "rule": "thresholds", "promptTokens": 256}}
    assert "# model: a policy is for pools" in result.stdout
    assert "    promptTokens: 256  # split_policy.prompt_length_threshold" in result.stdout.splitlines()


def test_a_mistake_in_a_policy_of_another_system_has_its_line() -> None:
    plugins = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n  parameters: {}\n"
    decider = "{type: prefix-based-pd-decider, parameters: {nonCachedTokens: many}}"
    for text, path, line in (
        ("qos:\n  enable_early_rejection: 1\n", "qos.enable_early_rejection", 2),
        ("qos: {}\nmodel: a\nsplit_policy:\n  a: 1\n", "split_policy.a", 4),
        (plugins.replace("{}", "5"), "plugins[0].parameters", 5),
        (f"{plugins}- {decider}\n", "plugins[prefix-based-pd-decider].parameters.nonCachedTokens", 6),
    ):
        (checked,) = check_text("one.yaml", text.encode())
        assert [(remark.level, remark.path, remark.line) for remark in checked.remarks] == [(ERROR, path, line)]


def test_several_policies_of_other_systems_in_a_file_have_names_of_their_own() -> None:
    found = check_text(
        "theirs.yaml", b"qos: {enable_early_rejection: true}\n---\ndisaggregated_router: {enable: true}\n"
    )
    assert [each.name for each in found] == ["InferencePolicy default/theirs-1", "InferencePolicy default/theirs-2"]


def test_a_file_that_is_not_there_is_wrong_usage() -> None:
    code, lines = run("/nowhere/at/all.yaml")
    assert code == 2
    assert "does not exist" in " ".join(lines)


def test_bytes_that_are_no_text_are_an_error() -> None:
    (checked,) = check_text("stdin", b"\x00\x01")
    assert checked.is_wrong


def is_refused_in_a_folder(text: str) -> bool:
    try:
        for document in read_documents(text.encode()):
            parse_inference_policy(document)
    except (DocumentFileError, PolicyDocumentError):
        return True
    return False


@pytest.mark.parametrize("envelope", [True, False])
def test_a_damaged_document_is_refused_where_the_picker_refuses_it_with_a_line_of_its_own(envelope: bool) -> None:
    chance, refused = random.Random(3), 0
    for _ in range(150):
        document = mutated(json.dumps(policy()), chance, most=1)
        text = yaml.safe_dump(document if envelope else document.get("spec"))
        is_refused = is_refused_in_a_folder(text)
        for checked in check_text("one.yaml", text.encode()):
            if envelope:
                assert checked.is_wrong is is_refused
            errors = [remark for remark in checked.remarks if remark.level == ERROR]
            least = 1 if checked.name else 0  # of what cannot be read as a document, not every mistake has a line
            assert all(least <= remark.line <= text.count("\n") for remark in errors)
            refused += len(errors)
    assert refused > 20


@pytest.mark.parametrize(
    "text",
    [
        "<<: {kind: List, items: [{apiVersion: kvmesh.io/v1alpha1, kind: InferencePolicy, spec: 5}]}",
        "a: &a {kind: List}\n<<: *a\nitems: &i [5]",
        "<<: [{kind: List}, {items: [5]}]\nb: 1",
    ],
)
def test_a_list_that_is_merged_from_elsewhere_is_judged_at_its_own_line(text: str) -> None:
    (found,) = check_text("a.yaml", text.encode())
    assert (found.is_wrong, found.line) == (True, 1 if text.startswith("<<") else 3)

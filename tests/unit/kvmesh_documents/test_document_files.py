"""YAML and JSON files as documents: all of a file or none, with the place of what is wrong."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from kvmesh.documents.document_files import DocumentFileError, read_documents
from kvmesh.documents.documents import Document

POD = b"apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: llm}\n"


def test_documents_lists_and_json_are_read_and_other_kinds_left_out() -> None:
    text = b"""
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Pod, metadata: {name: a}, status: {podIP: 10.0.0.1}}
- {apiVersion: apps/v1, kind: Deployment, metadata: {name: d}}
---
---
{"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": "p"}, "spec": {}}
"""
    assert [(each["kind"], each["metadata"]["name"]) for each in read_documents(text)] == [
        ("Pod", "a"),
        ("InferencePool", "p"),
    ]


def test_a_timestamp_stays_the_text_that_it_is_in_the_api() -> None:
    text = POD.replace(b"namespace: llm", b"namespace: llm, creationTimestamp: 2026-01-01T00:00:00Z")
    assert read_documents(text)[0]["metadata"]["creationTimestamp"] == "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"kind: [", "line 2"),
        (b"- 1", "document 1: must be a mapping"),
        (b"apiVersion: v1\nkind: Pod\n", "metadata.name: is missing"),
        (b"apiVersion: v1\nkind: Pod\nmetadata: {name: 7}\n", "metadata.name: must be text"),
        (POD + b"spec: 3\n", "spec: must be a mapping"),
        (POD + b"kind: Service\n", "line 4: 'kind' is there twice"),
        (POD + b"1: 2\n", "the key 1 must be text"),
        (POD + b"spec: {x: !!binary aGVsbG8=}\n", "a bytes has no meaning here"),
        (POD + b"spec: !!python/object:os.system {}\n", "line 4"),
        (POD + b"spec: &a {b: *a}\n", "refers to itself"),
        (b"apiVersion: kvmesh.io/v2\nkind: InferencePolicy\nmetadata: {name: p}\n", "kvmesh.io/v1alpha1 is"),
        (POD + b"spec: {x: !!bool maybe}\n", "line 4: 'maybe' cannot be read as bool"),
        (POD + b"spec:\n  x: !!int ''\n", "line 5: '' cannot be read as int"),
        (POD + b"spec: {x: !!float '-'}\n", "line 4: '-' cannot be read as float"),
        (POD + b"spec: {x: !!timestamp soon}\n", "line 4: 'soon' cannot be read as timestamp"),
        (POD + b"spec: {x: .nan}\n", "document 1, spec, x: nan is no number that JSON knows"),
        (POD + b"spec: {x: 0x1" + b"0" * 5000 + b"}\n", "document 1, spec, x: a whole number has 64 bits at most"),
        (POD.replace(b"llm", b"llm/x"), "metadata.namespace: may have letters"),
        (POD.replace(b"name: a", b'name: "a\\nb"'), "metadata.name: may have letters"),
        (b"\xff\xfe\x00", ""),
        (b"[" * 4_000_000, "too deep"),
        (b"{a: " * 1_000_000, "too deep"),
        (b"x" * (4 * 1024 * 1024 + 1), "at most 4194304 are read"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_with_the_place(text: bytes, words: str) -> None:
    with pytest.raises(DocumentFileError) as refused:
        read_documents(text)
    assert words in str(refused.value)


def test_policies_of_other_systems_are_passed_over_unless_somebody_translates_them() -> None:
    theirs = b"qos: {}\n---\n" + POD + b"\n---\napiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: []\n"
    assert [each["kind"] for each in read_documents(theirs)] == ["Pod"]
    given: list[tuple[str, Any]] = []

    def translate(place: str, value: Mapping[str, Any]) -> Document:
        given.append((place, value.get("kind")))
        return {"kind": "InferencePolicy"}

    assert [each["kind"] for each in read_documents(theirs, translate=translate)] == [
        "InferencePolicy",
        "Pod",
        "InferencePolicy",
    ]
    assert given == [("-1", None), ("-3", "EndpointPickerConfig")]


@pytest.mark.thorough
def test_much_out_of_little_is_refused() -> None:
    levels = "\n".join(f"l{level}: &l{level} [{', '.join(['*l' + str(level - 1)] * 9)}]" for level in range(1, 12))
    with pytest.raises(DocumentFileError, match="too large"):
        read_documents(f"l0: &l0 [a]\n{levels}\napiVersion: v1\n".encode())


def test_no_damage_to_a_file_raises_anything_else() -> None:
    chance = random.Random(7)
    text = bytearray(POD + b"spec:\n  containers:\n  - name: vllm\n    ports: [{containerPort: 8000, name: http}]\n")
    for _ in range(600):
        damaged = bytearray(text)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.choice(b"{}[]:,-&*!%@\"'\n\t |>#?0a\x00\xc3")
        try:
            read_documents(bytes(damaged))
        except DocumentFileError as refused:
            assert str(refused)


@pytest.mark.parametrize(
    ("kind", "version", "words"),
    [
        ("InferencePolcy", "kvmesh.io/v1alpha1", "kvmesh.io has no kind 'InferencePolcy'; InferencePolicy is one"),
        ("inferencepolicy", "kvmesh.io/v1alpha1", "kvmesh.io has no kind 'inferencepolicy'; InferencePolicy is one"),
        ("InferencePool", "kvmesh.io/v1", "kvmesh.io has no kind 'InferencePool'; InferencePolicy is one"),
        ("InferencePolicy", "kvmesh.io/v1", "apiVersion 'kvmesh.io/v1' is not known; kvmesh.io/v1alpha1 is"),
        ("InferencePolicy", "kvmesh.dev/v1alpha1", "'kvmesh.dev/v1alpha1' is not known; kvmesh.io/v1alpha1 is"),
        ("InferencePolicy", "v1alpha1", "apiVersion 'v1alpha1' is not known; kvmesh.io/v1alpha1 is"),
    ],
)
def test_a_kind_that_only_we_could_have_and_that_is_misspelt_refuses_its_file(
    kind: str, version: str, words: str
) -> None:
    text = f"apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a, namespace: llm}}\nspec: {{}}\n"
    with pytest.raises(DocumentFileError) as refused:
        read_documents(text.encode())
    assert words in str(refused.value)
    assert str(refused.value).startswith(f"{kind} a: ")

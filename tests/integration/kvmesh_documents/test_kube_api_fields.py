"""Field sets and managers under random objects: what server-side apply promises whatever is applied."""

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kube_api.applying import apply
from tests.kube_api.contract_crd import DEFINITION, widget
from tests.kube_api.errors import ApiError, Document
from tests.kube_api.field_sets import flat, from_fields, to_fields, tracked
from tests.kube_api.managed_fields import read_managers
from tests.kube_api.registry import resources_of
from tests.kube_api.state import State
from tests.kube_api.writing import Intent, field_type
from tests.unit.extproc_policy.policy_mutations import mutated

WIDGETS = resources_of(DEFINITION)[0]
AT = ("default", "a")

names = st.sampled_from(["a", "b", "c.d/e", 'q"', "."])
paths = st.lists(
    st.one_of(
        names.map(lambda name: f"f:{name}"),
        st.dictionaries(names, names, min_size=1, max_size=2).map(lambda keys: "k:" + json.dumps(keys)),
        names.map(lambda name: "v:" + json.dumps(name)),
    ),
    min_size=1,
    max_size=4,
).map(tuple)
parts = st.lists(
    st.builds(lambda name, weight: {"name": name, "weight": weight}, names, st.sampled_from([0.5, 0.75, 1.0])),
    min_size=1,
    max_size=3,
    unique_by=lambda part: part["name"],
)
specs = st.fixed_dictionaries(
    {},
    optional={
        "size": st.integers(1, 9),
        "title": st.sampled_from(["t", "u"]),
        "labels": st.dictionaries(st.sampled_from(["x", "y", "z"]), st.sampled_from(["1", "2"]), max_size=2),
        "parts": parts,
    },
)


def state() -> State:
    made = State()
    made.registry.add_definition(DEFINITION)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}
    resource = made.registry.find("", "v1", "namespaces")
    assert resource
    made.writer.create(resource, "", namespace, Intent())
    return made


def applied(server: State, manager: str, spec: dict[str, Any]) -> Document:
    document = {**widget("a"), "spec": spec}
    return apply(server.writer, WIDGETS, AT, document, Intent(manager=manager), force=True)


@given(st.frozensets(paths, max_size=8))
def test_paths_survive_being_written_as_fields(given_paths: frozenset[tuple[str, ...]]) -> None:
    assert frozenset(from_fields(to_fields(given_paths))) == given_paths


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["one", "two", "three"]), specs), min_size=1, max_size=6))
def test_every_managed_path_is_in_the_object_and_what_was_applied_last_is_there(
    wishes: list[tuple[str, dict[str, Any]]],
) -> None:
    server = state()
    for manager, spec in wishes:
        seen = applied(server, manager, spec)
        there = dict(flat(field_type(WIDGETS), tracked(seen)))
        for paths_of_one in read_managers(seen).values():
            assert paths_of_one <= set(there)
        for name, value in spec.items():
            if name not in {"parts", "labels"}:
                assert seen["spec"][name] == value
        assert all(part in seen["spec"]["parts"] for part in spec.get("parts", ()))
        assert seen["spec"].get("labels", {}).items() >= spec.get("labels", {}).items()


@settings(max_examples=40)
@given(specs, specs)
def test_what_comes_and_goes_with_one_manager_leaves_no_trace(first: dict[str, Any], second: dict[str, Any]) -> None:
    server = state()
    before = copy.deepcopy(applied(server, "one", first))
    applied(server, "two", {name: value for name, value in second.items() if name not in first})
    after = applied(server, "two", {})
    assert after["spec"] == before["spec"]


@settings(max_examples=40)
@given(specs)
def test_the_same_apply_again_is_no_write(spec: dict[str, Any]) -> None:
    server = state()
    once, again = applied(server, "one", spec), applied(server, "one", spec)
    assert once is again


def damaged(chance: random.Random) -> Document:
    whole = widget(
        "a", labels_of_object={"x": "y"}, finalizers=["x/y"], labels={"a": "b"}, wait="1s", title="t", least=1
    )
    return mutated(json.dumps(whole | {"status": {"phase": "Done"}}), chance)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_objects_are_refused_or_stored_and_nothing_else(seed: int) -> None:
    server, chance, outcomes = state(), random.Random(seed), set()
    for _ in range(120):
        document = damaged(chance)
        for write in ("create", "update", "status", "apply"):
            try:
                outcomes.add((write, _write(server, write, copy.deepcopy(document))))
            except ApiError as refused:
                outcomes.add((write, refused.code))
    codes = {code for _, code in outcomes}
    assert {200, 400, 422} <= codes <= {200, 400, 409, 422, 500}
    assert {code for write, code in outcomes if write != "apply"} <= {
        200,
        400,
        409,
        422,
    }  # 500: apply's undeclared field


def _write(server: State, write: str, document: Document) -> int:
    if write == "apply":
        apply(server.writer, WIDGETS, AT, document, Intent(manager="one"), force=True)
    elif write == "create":
        if server.store.get(WIDGETS.key, AT):
            server.store.remove(WIDGETS.key, AT)
        server.writer.create(WIDGETS, "default", document, Intent(manager="two"))
    else:
        if server.store.get(WIDGETS.key, AT) is None:
            server.writer.create(WIDGETS, "default", widget("a"), Intent(manager="two"))
        if isinstance(document.get("metadata"), dict):
            document["metadata"]["resourceVersion"] = server.writer.current(WIDGETS, AT)["metadata"]["resourceVersion"]
        server.writer.update(WIDGETS, AT, document, Intent(manager="two", subresource=write.replace("update", "")))
    return 200

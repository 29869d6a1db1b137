"""How an API server behaves, as tests that run against this one and against a real cluster: they keep the fake honest.

A subclass named Test… provides the fixture `rest`; each test gets a namespace of its own, which goes afterwards.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.kube_api.contract_crd import DEFINITION, widget
from tests.kube_api.errors import Document
from tests.kube_api.rest import APPLY, MERGE, OPERATIONS, Answer, Rest

DEADLINE_SECONDS = 20.0
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


async def eventually(look: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it is so, or fail."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await look():
            await asyncio.sleep(0.05)


class KubernetesContract:
    """What kvmesh relies on."""

    @pytest.fixture
    async def space(self, rest: Rest) -> AsyncIterator[str]:
        """A new namespace, with the contract's resource installed: the path of its objects."""
        await rest.ask("POST", CRDS, DEFINITION)
        name = f"kvmesh-contract-{secrets.token_hex(4)}"
        created = await rest.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}} | _named("v1", "Namespace"))
        assert created.code == 201
        path = f"/apis/contract.kvmesh.io/v1/namespaces/{name}/widgets"

        async def served() -> bool:
            return (await rest.ask("GET", path)).code == 200

        try:
            await eventually(served)
            yield path
        finally:
            await rest.ask("DELETE", f"/api/v1/namespaces/{name}")

    @pytest.fixture
    def configs(self, space: str) -> str:
        """The path of the namespace's ConfigMaps."""
        return f"/api/v1/namespaces/{space.split('/')[5]}/configmaps"

    async def test_a_new_object_gets_an_identity_a_generation_and_its_defaults_and_no_status(
        self, rest: Rest, space: str
    ) -> None:
        made = await rest.ask("POST", space, {**widget("a"), "status": {"phase": "Done"}})
        metadata = made.document["metadata"]
        assert made.code == 201
        assert metadata["generation"] == 1
        assert all(metadata[name] for name in ("uid", "resourceVersion", "creationTimestamp"))
        assert made.document["spec"] == {"size": 1, "mode": "Fast", "parts": [{"name": "x", "weight": 0.5}]}
        assert "status" not in made.document

    async def test_unknown_fields_are_pruned_with_a_warning(self, rest: Rest, space: str) -> None:
        made = await rest.ask("POST", space, widget("a", colour="red"))
        assert (made.code, "colour" in made.document["spec"]) == (201, False)
        assert made.warnings == ('299 - "unknown field \\"spec.colour\\""',)

    async def test_unknown_fields_are_refused_where_validation_is_strict(self, rest: Rest, space: str) -> None:
        made = await rest.ask("POST", space + "?fieldValidation=Strict", widget("a", colour="red"))
        assert (made.code, made.document["reason"]) == (400, "BadRequest")
        assert 'strict decoding error: unknown field "spec.colour"' in made.document["message"]

    async def test_every_wrong_field_is_named_at_once(self, rest: Rest, space: str) -> None:
        parts = [{"weight": 2}, *({"name": f"p{index}"} for index in range(8))]
        made = await rest.ask("POST", space, widget("a", size=0, mode="Odd", title="x" * 20, code="A b", parts=parts))
        assert (made.code, made.document["reason"]) == (422, "Invalid")
        assert made.causes == {
            ("FieldValueInvalid", "spec.size"),
            ("FieldValueNotSupported", "spec.mode"),
            ("FieldValueTooLong", "spec.title"),
            ("FieldValueInvalid", "spec.code"),
            ("FieldValueTooMany", "spec.parts"),
            ("FieldValueRequired", "spec.parts[0].name"),
            ("FieldValueInvalid", "spec.parts[0].weight"),
            ("FieldValueInvalid", "<nil>"),  # the rules were not asked
        }

    async def test_a_wrong_type_is_named(self, rest: Rest, space: str) -> None:
        made = await rest.ask("POST", space, widget("a", size="big"))
        assert made.causes == {("FieldValueTypeInvalid", "spec.size"), ("FieldValueInvalid", "<nil>")}

    async def test_items_of_a_list_map_are_there_once(self, rest: Rest, space: str) -> None:
        made = await rest.ask("POST", space, widget("a", parts=[{"name": "x"}, {"name": "x"}]))
        assert ("FieldValueDuplicate", "spec.parts[1]") in made.causes

    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            ({"least": 3, "most": 2}, "least must not be above most"),
            ({"wait": "0s"}, "wait must be at least 1ms"),
            ({"parts": [{"name": "x", "weight": 0.25}]}, "the weights sum up to less than a half"),
            ({"labels": {"*": "x"}}, "no wildcards"),
            ({"namespace": "kube-system"}, "not there"),
        ],
    )
    async def test_rules_refuse_with_their_message(
        self, rest: Rest, space: str, spec: dict[str, Any], words: str
    ) -> None:
        made = await rest.ask("POST", space, widget("a", **spec))
        assert (made.code, words in made.document["message"]) == (422, True), made.document

    async def test_transition_rules_compare_with_the_object_before(self, rest: Rest, space: str) -> None:
        await rest.ask("POST", space, widget("a", fixed="one"))
        changed = await rest.ask("PATCH", f"{space}/a", {"spec": {"fixed": "two"}}, media=MERGE)
        other = await rest.ask("PATCH", f"{space}/a", {"spec": {"size": 2}}, media=MERGE)
        assert (changed.code, other.code) == (422, 200)
        assert changed.causes == {("FieldValueInvalid", "spec.fixed")}

    async def test_a_name_is_taken_once_and_must_be_a_dns_name(self, rest: Rest, space: str) -> None:
        await rest.ask("POST", space, widget("a"))
        again, odd = await rest.ask("POST", space, widget("a")), await rest.ask("POST", space, widget("A_b"))
        assert (again.code, again.document["reason"]) == (409, "AlreadyExists")
        assert (odd.code, odd.causes) == (422, {("FieldValueInvalid", "metadata.name")})

    async def test_what_is_not_there_is_a_404_that_says_so(self, rest: Rest, space: str) -> None:
        missing = await rest.ask("GET", f"{space}/a")
        assert (missing.code, missing.document["message"]) == (404, 'widgets.contract.kvmesh.io "a" not found')

    @pytest.mark.parametrize(
        "path", ["/apis/nobody.example/v1/things", "/apis/nobody.example/v1", "/apis/nobody.example", "/nowhere"]
    )
    async def test_what_nobody_serves_is_a_404_without_a_document(self, rest: Rest, space: str, path: str) -> None:
        answer = await rest.ask("GET", path)
        assert (answer.code, answer.document) == (404, {"text": "404 page not found\n"})

    async def test_a_resource_that_its_group_does_not_have_is_a_404_without_a_document(
        self, rest: Rest, space: str
    ) -> None:
        beside = space.removesuffix("widgets") + "gadgets"
        answers = [await rest.ask("GET", path) for path in (beside, "/apis/contract.kvmesh.io/v9/widgets")]
        assert [(one.code, one.document) for one in answers] == [(404, {"text": "404 page not found\n"})] * 2

    async def test_a_stale_update_is_refused(self, rest: Rest, space: str) -> None:
        first = (await rest.ask("POST", space, widget("a"))).document
        await rest.ask("PATCH", f"{space}/a", {"spec": {"size": 2}}, media=MERGE)
        stale = await rest.ask("PUT", f"{space}/a", first)
        blind = await rest.ask("PUT", f"{space}/a", widget("a"))
        assert (stale.code, stale.document["reason"]) == (409, "Conflict")
        assert (blind.code, blind.causes) == (422, {("FieldValueInvalid", "metadata.resourceVersion")})

    async def test_the_generation_counts_changes_of_the_spec_only(self, rest: Rest, space: str) -> None:
        await rest.ask("POST", space, widget("a"))
        label = await rest.ask("PATCH", f"{space}/a", {"metadata": {"labels": {"a": "b"}}}, media=MERGE)
        state = await rest.ask("PATCH", f"{space}/a/status", {"status": {"phase": "Done"}}, media=MERGE)
        spec = await rest.ask("PATCH", f"{space}/a", {"spec": {"size": 2}}, media=MERGE)
        assert [one.document["metadata"]["generation"] for one in (label, state, spec)] == [1, 1, 2]

    async def test_the_status_is_written_at_its_own_path_only(self, rest: Rest, space: str) -> None:
        made = (await rest.ask("POST", space, widget("a"))).document
        both = {**made, "spec": {**made["spec"], "size": 9}, "status": {"phase": "Done"}}
        state = await rest.ask("PUT", f"{space}/a/status", both)
        assert (state.document["spec"]["size"], state.document["status"]) == (1, {"phase": "Done"})
        both["metadata"] = state.document["metadata"]
        spec = await rest.ask("PUT", f"{space}/a", {**both, "status": {"phase": "Other"}})
        assert (spec.document["spec"]["size"], spec.document["status"]) == (9, {"phase": "Done"})

    async def test_a_write_that_changes_nothing_leaves_the_version(self, rest: Rest, space: str) -> None:
        made = await rest.ask("POST", space, widget("a"))
        same = await rest.ask("PUT", f"{space}/a", made.document)
        assert same.version == made.version

    async def test_json_patches_test_and_change(self, rest: Rest, space: str) -> None:
        await rest.ask("POST", space, widget("a"))
        test = {"op": "test", "path": "/spec/size", "value": 1}
        add = {"op": "add", "path": "/spec/parts/-", "value": {"name": "y"}}
        done = await rest.ask("PATCH", f"{space}/a", [test, add], media=OPERATIONS)
        failed = await rest.ask("PATCH", f"{space}/a", [{**test, "value": 7}, add], media=OPERATIONS)
        assert [part["name"] for part in done.document["spec"]["parts"]] == ["x", "y"]
        assert failed.code == 422

    async def test_a_dry_run_changes_nothing(self, rest: Rest, space: str) -> None:
        made = await rest.ask("POST", space + "?dryRun=All", widget("a"))
        assert (made.code, (await rest.ask("GET", f"{space}/a")).code) == (201, 404)

    async def test_finalizers_hold_a_deleted_object(self, rest: Rest, space: str) -> None:
        await rest.ask("POST", space, widget("a", finalizers=["kvmesh.io/hold"]))
        held = await rest.ask("DELETE", f"{space}/a")
        assert held.document["metadata"]["deletionTimestamp"]
        free = await rest.ask("PATCH", f"{space}/a", {"metadata": {"finalizers": None}}, media=MERGE)
        assert (free.code, (await rest.ask("GET", f"{space}/a")).code) == (200, 404)

    async def test_a_deletion_may_demand_the_object_that_it_means(self, rest: Rest, space: str) -> None:
        await rest.ask("POST", space, widget("a"))
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": "another"}}
        refused = await rest.ask("DELETE", f"{space}/a", options)
        assert (refused.code, refused.document["reason"]) == (409, "Conflict")

    async def test_a_list_comes_in_pages_of_one_revision(self, rest: Rest, space: str) -> None:
        for name in ("a", "b", "c"):
            await rest.ask("POST", space, widget(name))
        first = await rest.ask("GET", f"{space}?limit=2")
        await rest.ask("DELETE", f"{space}/c")
        token = first.document["metadata"]["continue"]
        second = await rest.ask("GET", f"{space}?limit=2&continue={token}")
        assert [_names(one) for one in (first, second)] == [["a", "b"], ["c"]]
        assert first.document["kind"] == "WidgetList"
        assert (first.version, second.document["metadata"]["continue"]) == (second.version, "")

    async def test_selectors_choose(self, rest: Rest, space: str) -> None:
        for name, labels in (("a", {"app": "x"}), ("b", {"app": "y", "old": ""}), ("c", {})):
            await rest.ask("POST", space, widget(name, labels_of_object=labels))
        wanted = {
            "labelSelector=app%3Dx": ["a"],
            "labelSelector=app!%3Dx": ["b", "c"],
            "labelSelector=app%20in%20(x,y),!old": ["a"],
            "labelSelector=app": ["a", "b"],
            "fieldSelector=metadata.name%3Dc": ["c"],
        }
        seen = {query: _names(await rest.ask("GET", f"{space}?{query}")) for query in wanted}
        assert seen == wanted

    async def test_a_watch_tells_what_happens_after_its_revision_in_order(self, rest: Rest, space: str) -> None:
        await rest.ask("POST", space, widget("before"))
        listed = await rest.ask("GET", space)
        async with rest.watch(f"{space}?resourceVersion={listed.version}") as stream:
            await rest.ask("POST", space, widget("a"))
            await rest.ask("PATCH", f"{space}/a", {"spec": {"size": 2}}, media=MERGE)
            await rest.ask("DELETE", f"{space}/a")
            events = [await stream.next() for _ in range(3)]
        assert [(kind, one["metadata"]["name"]) for kind, one in events] == [
            ("ADDED", "a"),
            ("MODIFIED", "a"),
            ("DELETED", "a"),
        ]
        versions = [int(one["metadata"]["resourceVersion"]) for _, one in events]
        assert versions == sorted(set(versions))

    async def test_a_watch_without_a_revision_begins_with_what_is_there(self, rest: Rest, space: str) -> None:
        await rest.ask("POST", space, widget("a"))
        async with rest.watch(space) as stream:
            kind, seen = await stream.next()
        assert (kind, seen["metadata"]["name"]) == ("ADDED", "a")

    async def test_an_object_that_leaves_the_selection_is_deleted_for_the_watch(self, rest: Rest, space: str) -> None:
        await rest.ask("POST", space, widget("a", labels_of_object={"app": "x"}))
        listed = await rest.ask("GET", space)
        async with rest.watch(f"{space}?resourceVersion={listed.version}&labelSelector=app%3Dx") as stream:
            for label in ("y", "x"):
                await rest.ask("PATCH", f"{space}/a", {"metadata": {"labels": {"app": label}}}, media=MERGE)
            events = [await stream.next() for _ in range(2)]
        assert [kind for kind, _ in events] == ["DELETED", "ADDED"]

    async def test_a_watch_ends_when_its_time_is_over(self, rest: Rest, space: str) -> None:
        async with rest.watch(f"{space}?timeoutSeconds=1") as stream:
            with pytest.raises(EOFError):
                await stream.next()

    async def test_appliers_conflict_about_a_field_that_both_want(self, rest: Rest, space: str) -> None:
        await _apply(rest, f"{space}/a", widget("a", size=2), "one")
        refused = await _apply(rest, f"{space}/a", widget("a", size=3), "two")
        forced = await _apply(rest, f"{space}/a", widget("a", size=3), "two", force=True)
        assert (refused.code, refused.document["reason"]) == (409, "Conflict")
        assert refused.causes == {("FieldManagerConflict", ".spec.size")}
        assert 'Apply failed with 1 conflict: conflict with "one": .spec.size' in refused.document["message"]
        assert forced.document["spec"]["size"] == 3

    async def test_what_an_applier_gives_up_goes_unless_another_has_it(self, rest: Rest, space: str) -> None:
        own, shared = {"name": "own"}, {"name": "shared", "weight": 0.75}
        await _apply(rest, f"{space}/a", _applied(title="t", code="c", parts=[own, shared]), "one")
        await _apply(rest, f"{space}/a", _applied(code="c", parts=[shared]), "two")
        done = await _apply(rest, f"{space}/a", _applied(size=1), "one")
        assert done.document["spec"] == {"size": 1, "mode": "Fast", "code": "c", "parts": [shared]}

    async def test_appliers_share_a_list_map_item_by_item(self, rest: Rest, space: str) -> None:
        await _apply(rest, f"{space}/a", _applied(parts=[{"name": "x", "weight": 0.5}]), "one")
        done = await _apply(rest, f"{space}/a", _applied(parts=[{"name": "y", "weight": 0.25}]), "two")
        assert {part["name"]: part["weight"] for part in done.document["spec"]["parts"]} == {"x": 0.5, "y": 0.25}

    async def test_an_update_takes_the_fields_that_it_changes(self, rest: Rest, space: str) -> None:
        await _apply(rest, f"{space}/a", widget("a", size=2), "one")
        await rest.ask("PATCH", f"{space}/a?fieldManager=two", {"spec": {"size": 3}}, media=MERGE)
        refused = await _apply(rest, f"{space}/a", widget("a", size=2), "one")
        assert (refused.code, refused.causes) == (409, {("FieldManagerConflict", ".spec.size")})

    async def test_the_same_apply_again_changes_nothing(self, rest: Rest, space: str) -> None:
        first = await _apply(rest, f"{space}/a", widget("a"), "one")
        second = await _apply(rest, f"{space}/a", widget("a"), "one")
        assert (first.code, second.code, second.version) == (201, 200, first.version)

    async def test_one_lease_has_one_holder(self, rest: Rest, space: str) -> None:
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{space.split('/')[5]}/leases"
        lease = _named("coordination.k8s.io/v1", "Lease") | {"metadata": {"name": "leader"}, "spec": {}}
        made = (await rest.ask("POST", leases, lease)).document
        first = await rest.ask("PUT", f"{leases}/leader", {**made, "spec": {"holderIdentity": "one"}})
        second = await rest.ask("PUT", f"{leases}/leader", {**made, "spec": {"holderIdentity": "two"}})
        assert (first.code, second.code) == (200, 409)

    async def test_built_in_kinds_merge_strategically_and_list_without_their_kind(
        self, rest: Rest, configs: str
    ) -> None:
        await rest.ask("POST", configs, _named("v1", "ConfigMap") | {"metadata": {"name": "a"}, "data": {"x": "1"}})
        media = "application/strategic-merge-patch+json"
        merged = await rest.ask("PATCH", f"{configs}/a", {"data": {"x": None, "y": "2"}}, media=media)
        listed = await rest.ask("GET", f"{configs}?fieldSelector=metadata.name%3Da")
        assert merged.document["data"] == {"y": "2"}
        assert (listed.document["kind"], "kind" in listed.document["items"][0]) == ("ConfigMapList", False)

    async def test_who_may_not_is_told_what(self, rest: Rest, space: str) -> None:
        stranger = rest.as_user("kvmesh-stranger")
        refused = await stranger.ask("GET", space)
        words = (
            'widgets.contract.kvmesh.io is forbidden: User "kvmesh-stranger" cannot list resource "widgets" in API '
            f'group "contract.kvmesh.io" in the namespace "{space.split("/")[5]}"'
        )
        assert (refused.code, refused.document["message"]) == (403, words)

    async def test_a_zero_that_stands_for_nothing_is_not_stored(self, rest: Rest, space: str) -> None:
        definition = (await rest.ask("GET", f"{CRDS}/{DEFINITION['metadata']['name']}")).document
        columns = definition["spec"]["versions"][0]["additionalPrinterColumns"]
        assert [sorted(column) for column in columns] == [["jsonPath", "name", "type"]] * len(columns)

    async def test_what_nobody_merges_field_by_field_is_stored_with_its_defaults(self, rest: Rest, space: str) -> None:
        sets = f"/apis/apps/v1/namespaces/{space.split('/')[5]}/statefulsets"
        field = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        spec = {
            "replicas": 0,
            "selector": {"matchLabels": {"app": "a"}},
            "template": {
                "metadata": {"labels": {"app": "a"}},
                "spec": {"containers": [{"name": "a", "image": "a:1", "env": [field]}]},
            },
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
        }
        made = await _apply(
            rest, f"{sets}/a", _named("apps/v1", "StatefulSet") | {"metadata": {"name": "a"}, "spec": spec}, "one"
        )
        stored = made.document["spec"]
        [kept] = stored["volumeClaimTemplates"]
        [variable] = stored["template"]["spec"]["containers"][0]["env"]
        assert variable["valueFrom"]["fieldRef"] == {"apiVersion": "v1", "fieldPath": "status.podIP"}
        assert (kept["spec"]["volumeMode"], kept["status"]) == ("Filesystem", {"phase": "Pending"})

    async def test_nothing_is_made_in_a_namespace_that_goes(self, rest: Rest, space: str) -> None:
        await rest.ask("POST", space, widget("a", finalizers=["kvmesh.io/hold"]))
        await rest.ask("DELETE", space.removesuffix("/widgets").replace("/apis/contract.kvmesh.io/v1", "/api/v1"))

        async def refused() -> bool:
            return (await rest.ask("POST", space, widget("b"))).code == 403

        await eventually(refused)
        answer = await rest.ask("POST", space, widget("b"))
        free = await rest.ask("PATCH", f"{space}/a", {"metadata": {"finalizers": None}}, media=MERGE)
        name = space.split("/")[5]
        said = f"unable to create new content in namespace {name} because it is being terminated"
        assert (answer.document["reason"], answer.causes, free.code) == (
            "Forbidden",
            {("NamespaceTerminating", "metadata.namespace")},
            200,
        )
        assert answer.document["message"] == f'widgets.contract.kvmesh.io "b" is forbidden: {said}'


def _named(api_version: str, kind: str) -> Document:
    return {"apiVersion": api_version, "kind": kind}


def _names(answer: Answer) -> list[str]:
    return [item["metadata"]["name"] for item in answer.document["items"]]


def _applied(**spec: Any) -> Document:
    return {**widget("a"), "spec": spec}


async def _apply(rest: Rest, path: str, document: Document, manager: str, *, force: bool = False) -> Answer:
    query = f"?fieldManager={manager}" + ("&force=true" if force else "")
    return await rest.ask("PATCH", path + query, document, media=APPLY)

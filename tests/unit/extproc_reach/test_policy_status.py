"""What a policy's status says, and when its times change."""

from dataclasses import replace

from msgspec import structs

from extproc.policy.model_tokens import NOT_SEEN, ModelTokens
from extproc.reach.mesh_policy import MeshPolicy, MeshState
from extproc.reach.status import Condition, Findings, conditions_of, is_written, shortened
from kvmesh.documents.documents import DocumentKey, StatusUpdate, status_to_write
from tests.unit.extproc_reach.mesh_documents import (
    ACCEPTED,
    IN_FORCE,
    Mesh,
    gateway,
    inference_policy,
    inference_pool,
    route,
    told,
)


def fallbacks(count: int) -> dict[str, object]:
    return {"scoring": {"fallbacks": count}}


def test_the_younger_of_two_policies_of_one_level_is_told_who_wins_which_fields() -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        inference_policy("a/old", {"scoring": {"fallbacks": 1, "weights": {"lora": 2}}}, day=1),
        inference_policy("a/young", {"scoring": {"fallbacks": 3, "weights": {"lora": 3, "session": 1}}}, day=2),
    )
    assert told(state, "a/old") == IN_FORCE
    assert told(state, "a/young")["Programmed"] == (
        "True PartiallyProgrammed",
        "an older policy (or one whose name comes first) of the same level decides: "
        "spec.scoring.fallbacks, spec.scoring.weights.lora (by a/old)",
    )
    assert told(state, "a/young")["Accepted"] == IN_FORCE["Accepted"]


def test_a_field_that_is_in_force_at_some_pool_is_not_overridden() -> None:
    mesh = Mesh()
    mesh.put(inference_pool("a/llama"), inference_pool("b/qwen"))
    mesh.put(inference_policy("istio-system/mesh", fallbacks(1)), inference_policy("a/own", fallbacks(3)))
    assert told(mesh.update(), "istio-system/mesh") == IN_FORCE
    state = mesh.update(inference_policy("b/own", fallbacks(4)))
    assert told(state, "istio-system/mesh") == {
        "Accepted": ACCEPTED,
        "Programmed": (
            "False Overridden",
            "nothing of it is in force; has no effect anywhere, more specific policies decide: "
            "spec.scoring.fallbacks (by a/own, b/own)",
        ),
    }


def test_a_policy_that_loses_every_field_to_an_older_one_is_not_programmed() -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        inference_policy("a/old", fallbacks(1), day=1),
        inference_policy("a/young", fallbacks(3), day=2),
    )
    assert told(state, "a/young")["Accepted"] == ACCEPTED
    assert told(state, "a/young")["Programmed"] == (
        "False Conflicted",
        "nothing of it is in force; an older policy (or one whose name comes first) of the same level decides: "
        "spec.scoring.fallbacks (by a/old)",
    )


def test_targets_that_are_missing_are_named_and_the_others_hold() -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        inference_policy("a/own", fallbacks(5), InferencePool="llama", HTTPRoute="gone"),
    )
    assert state.configs["a/llama"].policy.fallbacks == 5
    assert told(state, "a/own") == {**IN_FORCE, "Warning": ("CheckPolicy", "HTTPRoute a/gone is not there")}


def test_a_policy_that_covers_nothing_is_accepted_with_a_warning() -> None:
    state = Mesh().update(
        gateway("a/public"),
        route("a/route", to="a/gone"),
        inference_policy("a/by-gateway", fallbacks(5), Gateway="public"),
        inference_policy("a/by-route", fallbacks(5), HTTPRoute="route"),
        inference_policy("istio-system/mesh", fallbacks(5)),
    )
    assert {source: told(state, source)["Warning"][1] for source in state.statuses} == {
        "a/by-gateway": "covers no pool: Gateway a/public leads to none",
        "a/by-route": "covers no pool: HTTPRoute a/route leads to none",
        "istio-system/mesh": "covers no pool: there is none in the mesh",
    }
    assert {told(state, source)["Accepted"][0] for source in state.statuses} == {"True Accepted"}
    assert {told(state, source)["Programmed"][0] for source in state.statuses} == {"False Pending"}


def test_what_is_valid_and_hardly_meant_is_a_warning_of_whoever_said_it() -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        inference_policy(
            "istio-system/mesh", {"priorities": {"classes": [{"name": "x", "priority": 500, "reservedShare": 0.2}]}}
        ),
        inference_policy("a/own", {"load": {"overload": {"kvUsage": 0.01}}}),
        inference_policy("a/fine", fallbacks(1)),
    )
    assert told(state, "a/own")["Warning"][1].startswith("spec.load.overload.kvUsage: ")
    assert told(state, "istio-system/mesh")["Warning"][1].startswith("spec.priorities.classes[x].reservedShare: ")
    assert told(state, "istio-system/mesh")["Warning"][1].endswith("(at a/llama)")
    assert told(state, "a/fine") == IN_FORCE


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    mesh = Mesh()
    good = inference_policy("a/own", fallbacks(5))
    first = mesh.update(inference_pool("a/llama"), good).statuses["a/own"]
    assert [each.last_transition_time for each in first.conditions] == ["2026-03-01T00:00:01Z"] * 2
    again = mesh.update(inference_policy("a/own", fallbacks(6), generation=2)).statuses["a/own"]
    assert [each.last_transition_time for each in again.conditions] == ["2026-03-01T00:00:01Z"] * 2
    bad = mesh.update(inference_policy("a/own", fallbacks(-6), generation=3)).statuses["a/own"]
    assert [each.last_transition_time for each in bad.conditions] == ["2026-03-01T00:00:03Z"] * 2


def test_the_times_in_the_document_go_before_our_own() -> None:
    mesh = Mesh()
    state = mesh.update(inference_pool("a/llama"), inference_policy("a/own", fallbacks(5)))
    mesh.write(state.statuses["a/own"])
    fresh = Mesh(policy=MeshPolicy(), documents=dict(mesh.documents))  # another replica, or this one after a restart
    fresh.now = mesh.now
    later = fresh.update()
    assert later.statuses == state.statuses
    assert later.unwritten == ()


def test_a_status_is_to_be_written_until_the_document_has_it() -> None:
    mesh = Mesh()
    state = mesh.update(inference_pool("a/llama"), inference_policy("a/own", fallbacks(5)))
    assert state.unwritten == (state.statuses["a/own"],)
    assert mesh.update().unwritten == state.unwritten
    merges = mesh.policy.book.merges
    mesh.write(state.statuses["a/own"])
    written = mesh.update()
    assert (written.unwritten, written.statuses) == ((), state.statuses)
    assert mesh.policy.book.merges == merges
    assert written.configs["a/llama"] is state.configs["a/llama"]


def test_somebody_who_overwrites_our_entry_is_corrected_and_others_entries_do_not_matter() -> None:
    mesh = Mesh()
    status = mesh.update(inference_pool("a/llama"), inference_policy("a/own", fallbacks(5))).statuses["a/own"]
    theirs = {"ancestorRef": {"name": "x"}, "controllerName": "kvmesh.io/picker/other", "conditions": []}
    assert is_written(status, {"status": {"ancestors": [status.entry()]}})
    document = {"status": {"ancestors": [theirs, status.entry()]}}
    assert is_written(status, document)
    assert not is_written(replace(status, installation="third"), document)
    document["status"]["ancestors"][1]["conditions"][0]["message"] = "no"
    assert not is_written(status, document)
    for broken in ({}, {"status": None}, {"status": {"ancestors": "x"}}, {"status": {"ancestors": [3, {}]}}):
        assert not is_written(status, broken)


def test_two_installations_with_different_views_each_keep_their_own_entry_and_come_to_rest() -> None:
    document = inference_policy("a/own", fallbacks(5))
    views = [Mesh(policy=MeshPolicy(installation=name)) for name in ("one", "two")]
    views[0].put(inference_pool("a/llama"))  # the second installation does not see the pool
    for _ in range(2):
        for view in views:
            state = view.update(document)
            for status in state.unwritten:
                key = DocumentKey("kvmesh.io", "InferencePolicy", "a", "own")
                update = StatusUpdate(key=key, uid=status.uid, generation=1, entry=status.entry())
                document = {**document, "status": status_to_write(document, update)}
    assert [each["controllerName"] for each in document["status"]["ancestors"]] == [
        "kvmesh.io/picker/one",
        "kvmesh.io/picker/two",
    ]
    assert [view.update(document).unwritten for view in views] == [(), ()]
    assert [told(view.policy.state, "a/own")["Programmed"][0] for view in views] == [
        "True Programmed",
        "False Pending",
    ]


def test_the_status_document_is_what_the_api_takes() -> None:
    status = Mesh().update(inference_pool("a/llama"), inference_policy("a/own", {}, generation=7)).statuses["a/own"]
    assert (status.namespace, status.name, status.uid) == ("a", "own", "uid-of-a/own")
    times = {"observedGeneration": 7, "lastTransitionTime": "2026-03-01T00:00:01Z"}
    assert status.entry() == {
        "ancestorRef": {"group": "", "kind": "Service", "namespace": "default", "name": "kvmesh-picker"},
        "controllerName": "kvmesh.io/picker/default",
        "conditions": [
            {"type": "Accepted", "status": "True", "reason": "Accepted", "message": ACCEPTED[1], **times},
            {"type": "Programmed", "status": "True", "reason": "Programmed", "message": "the policy is in force"}
            | times,
            {"type": "Warning", "status": "True", "reason": "CheckPolicy", "message": "spec: sets nothing", **times},
        ],
    }


def test_models_without_exact_tokens_are_named_with_their_pools_and_what_to_do() -> None:
    mesh = Mesh()
    mesh.put(*(inference_pool(f"a/{name}") for name in ("llama", "mistral", "qwen", "yi")))
    mesh.put(inference_policy("a/all", fallbacks(1)), inference_policy("a/own", fallbacks(2), InferencePool="yi"))
    wrong = ModelTokens(model="m", wanted="auto", seen="text", reason="text-only", message="m: only text: do this")
    known = ModelTokens(model="m", wanted="auto", seen="pods")
    unseen = ModelTokens(model="n", wanted="auto", reason=NOT_SEEN, message="nobody knows yet")
    tokens = {"a/llama": (wrong, unseen), "a/qwen": (wrong,), "a/yi": (known, unseen)}
    state = mesh.policy.update(mesh.snapshot(), now=mesh.now, tokens=tokens)
    assert told(state, "a/all")["ExactTokens"] == ("False TextOnly", "m: only text: do this (at a/llama, a/qwen)")
    assert "ExactTokens" not in told(state, "a/own")
    tokens = {f"a/{name}": (wrong,) for name in ("llama", "mistral", "qwen", "yi")}
    state = mesh.policy.update(mesh.snapshot(), now=mesh.now, tokens=tokens)
    assert told(state, "a/all")["ExactTokens"][1].endswith("(at a/llama, a/mistral, a/qwen); and 1 more")
    assert "ExactTokens" not in told(mesh.update(), "a/all")


def test_policies_that_only_count_say_so_with_the_pools_and_who_has_put_them_into_shadow() -> None:
    mesh = Mesh()
    mesh.put(*(inference_pool(f"a/{name}") for name in ("llama", "qwen", "yi")))
    mesh.put(
        inference_policy("a/all", {"quotas": [{"requestsPerMinute": 60}], "shadow": True}),
        inference_policy("a/own", fallbacks(2), InferencePool="yi"),
        inference_policy("a/acts", {"shadow": False}, InferencePool="qwen"),
    )
    state = mesh.update()
    words = "nothing is refused, held back, degraded, offloaded or scaled, only counted: at {} by spec.shadow of a/all"
    assert told(state, "a/all")["Shadow"] == ("True OnlyCounted", words.format("a/llama, a/yi"))
    assert told(state, "a/own")["Shadow"] == ("True OnlyCounted", words.format("a/yi"))
    assert "Shadow" not in told(state, "a/acts")
    assert told(state, "a/all")["Accepted"][0] == "True Accepted"
    assert [name for name, config in state.configs.items() if config.policy.shadow] == ["a/llama", "a/yi"]
    state = mesh.update(inference_policy("a/all", {"shadow": False}))
    assert "Shadow" not in told(state, "a/all")


def test_a_message_is_never_longer_than_anybody_reads_and_names_few_fields_of_many() -> None:
    conflicts = {"a/x": [f"spec.field{i:02}" for i in range(20)]}
    accepted, _ = conditions_of(Findings(conflicts=conflicts, overridden={}, invalid="x" * 5000), generation=1)
    _, programmed = conditions_of(Findings(conflicts=conflicts, overridden={}), generation=1)
    assert isinstance(accepted, Condition)
    assert len(accepted.message) == 1024
    assert programmed.message.endswith("spec.field07 and 12 more (by a/x)")
    assert shortened("short") == "short"


def test_times_that_another_leader_has_written_are_kept_rather_than_our_own() -> None:
    mesh = Mesh()
    ours = mesh.update(inference_pool("a/llama"), inference_policy("a/own", fallbacks(5))).statuses["a/own"]
    theirs = replace(
        ours,
        conditions=tuple(
            structs.replace(each, last_transition_time="2026-02-02T00:00:00Z") for each in ours.conditions
        ),
    )
    mesh.write(theirs)
    state = mesh.update()
    assert (state.statuses["a/own"], state.unwritten) == (theirs, ())


def test_an_object_that_was_made_anew_has_times_of_its_own() -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_policy("a/own", fallbacks(5), uid="first"))
    anew = mesh.update(inference_policy("a/own", fallbacks(5), uid="second")).statuses["a/own"]
    assert [each.last_transition_time for each in anew.conditions] == ["2026-03-01T00:00:02Z"] * 2


def test_a_host_stays_where_it_was_claimed_first_and_both_sides_are_told() -> None:
    mesh = Mesh()
    hosts = {"hosts": ["llm.example.com"]}
    first = inference_policy("a/first", hosts, day=9, InferencePool="llama")
    old = inference_policy("b/old", {}, day=2, InferencePool="qwen")
    state = mesh.update(inference_pool("a/llama"), inference_pool("b/qwen"), first, old)
    assert told(state, "a/first") == IN_FORCE

    def is_settled(state: MeshState) -> None:
        assert told(state, "b/old")["Programmed"][1].endswith(
            "claimed first by another: spec.hosts[llm.example.com] (by a/first)"
        )
        assert [problem.where for problem in state.problems] == ["InferencePolicy b/old"]
        assert "llm.example.com is claimed by b/old, too" in told(state, "a/first")["Warning"][1]
        assert {name: config.hosts for name, config in state.configs.items()} == {
            "a/llama": {"llm.example.com"},
            "b/qwen": frozenset(),
        }

    is_settled(state := mesh.update({**old, "spec": {**old["spec"], **hosts}}))
    for status in state.unwritten:
        mesh.write(status)
    assert not mesh.update().unwritten
    for restarted in (Mesh(documents=mesh.documents), Mesh(documents=dict(reversed(mesh.documents.items())))):
        is_settled(restarted.update())

    mesh.remove(first)
    state = mesh.update()
    assert told(state, "b/old") == IN_FORCE
    assert state.configs["b/qwen"].hosts == {"llm.example.com"}
    for status in state.unwritten:
        mesh.write(status)
    is_back = mesh.update(first)
    assert is_back.configs["a/llama"].hosts == frozenset()


def test_replicas_that_saw_two_claims_in_another_order_agree_once_the_leader_has_written() -> None:
    pools = (inference_pool("a/llama"), inference_pool("b/qwen"))
    claims = [
        inference_policy("a/one", {"hosts": ["llm.example.com"]}, InferencePool="llama"),
        inference_policy("b/two", {"hosts": ["llm.example.com"]}, InferencePool="qwen"),
    ]
    leader, other = Mesh(), Mesh()
    for mesh, order in ((leader, claims), (other, claims[::-1])):
        mesh.update(*pools)
        for claim in order:
            mesh.update(claim)
    for status in leader.policy.state.unwritten:
        leader.write(status)
    other.documents = leader.documents

    for mesh in (leader, other):
        assert {name: config.hosts for name, config in mesh.update().configs.items()} == {
            "a/llama": {"llm.example.com"},
            "b/qwen": frozenset(),
        }


def test_an_annotated_host_is_not_taken_by_an_older_policy_either() -> None:
    mesh = Mesh()
    old = inference_policy("b/old", {}, day=2, InferencePool="qwen")
    mesh.update(inference_pool("a/llama", day=5, hosts="llm.example.com"), inference_pool("b/qwen"), old)
    state = mesh.update({**old, "spec": {**old["spec"], "hosts": ["llm.example.com"]}})
    for status in state.unwritten:
        mesh.write(status)

    for state in (mesh.update(), Mesh(documents=mesh.documents).update()):
        assert state.configs["a/llama"].hosts == {"llm.example.com"}
        assert told(state, "b/old")["Programmed"][1].endswith("(by InferencePool a/llama)")
        assert [problem.reason for problem in state.problems] == ["host-claimed"]

"""What pods are for: flags before selectors before labels, and what no word says."""

import pytest

from extproc.pods.endpoint import Role
from extproc.policy.disaggregation import Disaggregation, Link
from extproc.reach.mesh_policy import cordoned_of, pair_labels_of, role_problems, roles_of
from kvmesh.documents.pools import Pool, PoolEndpoint

NO_POLICY = Disaggregation()


def endpoint(address: str = "a:1", /, **labels: str) -> PoolEndpoint:
    return PoolEndpoint(address=address, pod=f"ns/{address}", labels=labels)


def role(policy: Disaggregation = NO_POLICY, flags: dict[str, Role] | None = None, /, **labels: str) -> Role:
    return roles_of([endpoint(**labels)], policy, flags=flags or {}).get("a:1", Role.BOTH)


@pytest.mark.parametrize("label", ["kvmesh.io/role", "llm-d.ai/role", "inference.networking.k8s.io/role"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("prefill", Role.PREFILL),
        ("encode-prefill", Role.PREFILL),
        ("decode", Role.DECODE),
        ("both", Role.BOTH),
        ("prefill-decode", Role.BOTH),
        ("encode-prefill-decode", Role.BOTH),
        ("prefil", Role.BOTH),
    ],
)
def test_a_label_says_what_a_pod_is_for(label: str, value: str, expected: Role) -> None:
    assert role(**{label: value}) is expected


def test_flags_go_before_selectors_and_selectors_before_labels() -> None:
    policy = Disaggregation(prefill_selector={"tier": "p"}, decode_selector={"tier": "d", "gpu": "h200"})
    labels = {"llm-d.ai/role": "decode", "tier": "p"}
    assert role(**labels) is Role.DECODE
    assert role(policy, **labels) is Role.PREFILL
    assert role(policy, {"a:1": Role.DECODE}, **labels) is Role.DECODE
    assert role(policy, {"a:1": Role.BOTH}, **labels) is Role.BOTH
    assert role(policy, tier="d") is Role.BOTH  # not all of the selector
    assert role(policy, tier="d", gpu="h200") is Role.DECODE


def test_our_own_label_goes_before_the_others() -> None:
    assert role(**{"llm-d.ai/role": "decode", "kvmesh.io/role": "prefill"}) is Role.PREFILL


def test_pods_that_only_encode_and_those_that_are_closed_get_nothing() -> None:
    pods = [PoolEndpoint(address="a:1", cordoned=True), endpoint("b:1", **{"llm-d.ai/role": "encode"}), endpoint("c:1")]
    assert cordoned_of(pods, flags=frozenset({"f:1"})) == {"a:1", "b:1", "f:1"}


def test_the_labels_that_pairs_are_made_by_are_those_that_the_policy_names() -> None:
    pods = [endpoint("a:1", zone="z", rev="1", app="x"), endpoint("b:1", app="x")]
    policy = Disaggregation(enabled=True, same_labels=("rev",), links=(Link(label="zone", bytes_per_second=1.0),))
    assert pair_labels_of(pods, policy) == {"a:1": {"zone": "z", "rev": "1"}, "b:1": {}}
    assert pair_labels_of(pods, Disaggregation(same_labels=("rev",))) == {}  # it is off
    assert pair_labels_of(pods, Disaggregation(enabled=True)) == {}


def problems(*pods: PoolEndpoint, policy: Disaggregation = NO_POLICY) -> list[tuple[str, str]]:
    pool = Pool(name="ns/pool", kind="InferencePool", endpoints=pods)
    found = role_problems(pool, policy, roles_of(pods, policy, flags={}))
    return [(problem.reason, problem.words) for problem in found]


def test_a_role_that_is_no_word_is_a_problem() -> None:
    pods = [endpoint("a:1", **{"llm-d.ai/role": "prefil"}), endpoint("b:1", **{"llm-d.ai/role": "encode"})]
    ((reason, words),) = problems(*pods)
    assert (reason, words.partition(",")[0]) == ("role-unknown", "pod ns/a:1 has llm-d.ai/role='prefil'")


def test_prefill_pods_that_nobody_asks_or_that_nobody_decodes_for_are_a_problem() -> None:
    prefill, decode = endpoint("a:1", **{"llm-d.ai/role": "prefill"}), endpoint("b:1", **{"llm-d.ai/role": "decode"})
    enabled = Disaggregation(enabled=True)
    assert [reason for reason, _ in problems(prefill, policy=enabled)] == ["no-decode-pods"]
    assert [reason for reason, _ in problems(prefill, decode)] == ["prefill-pods-idle"]
    assert problems(prefill, decode, policy=enabled) == problems(decode) == problems(endpoint()) == []

"""What the API server gets for a path and a selector."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from extproc.external_metrics.answers import METRICS, Answer, answer
from extproc.external_metrics.api_objects import quantity
from extproc.install.external_metrics import API_SERVICE_NAME
from extproc.scaling.seen import Signal, State

BASE = "/apis/external.metrics.k8s.io/v1beta1"
NOW = "2026-01-01T00:00:00Z"


def signal(role: str = "both", **given: Any) -> Signal:
    usual = {"wanted": 4, "told": 4, "ready": 2, "present": 3, "queued_tokens": 1500.5, "saturation": 1.25}
    rates = {"input_tokens_per_second": 900.0, "cached_tokens_per_second": 0.5, "output_tokens_per_second": 70.0}
    return Signal(role=role, **{**usual, **rates, "reason": "why", **given})


@dataclass
class Pools:
    by_name: dict[str, dict[str, Signal | None]] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.by_name)

    def signals(self, name: str) -> Mapping[str, Signal] | None:
        roles = self.by_name.get(name)
        return None if roles is None else {role: told for role, told in roles.items() if told is not None}

    def scaled_roles(self, name: str) -> Collection[str]:
        return self.by_name.get(name, {})


POOLS = Pools(
    {
        "llm/a": {"both": signal()},
        "llm/b": {"prefill": signal("prefill", told=7), "decode": signal("decode")},
        "llm/plain": {},
        "chat/a": {"both": signal(told=9)},
        "empty/a": {},
    }
)


def get(
    metric: str = "kvmesh-wanted-replicas", selector: str = "", *, namespace: str = "llm", pools: Pools = POOLS
) -> Answer:
    return answer(f"{BASE}/namespaces/{namespace}/{metric}", selector, pools, timestamp=NOW)


def refusal(answered: Answer) -> tuple[int, str, str]:
    body = answered.body
    assert (body["kind"], body["apiVersion"], body["status"], body["code"]) == (
        "Status",
        "v1",
        "Failure",
        answered.code,
    )
    return answered.code, body["reason"], body["message"]


def test_the_wanted_number_is_a_list_of_one_value() -> None:
    answered = get(selector="pool=b,role=prefill")
    assert answered.code == 200
    assert answered.body == {
        "kind": "ExternalMetricValueList",
        "apiVersion": "external.metrics.k8s.io/v1beta1",
        "metadata": {},
        "items": [
            {
                "metricName": "kvmesh-wanted-replicas",
                "metricLabels": {"pool": "b", "role": "prefill"},
                "timestamp": NOW,
                "value": "7",
            }
        ],
    }


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("kvmesh-wanted-replicas", "4"),
        ("kvmesh-queued-tokens", "1500500m"),
        ("kvmesh-input-tokens-per-second", "900"),
        ("kvmesh-cached-tokens-per-second", "500m"),
        ("kvmesh-output-tokens-per-second", "70"),
        ("kvmesh-saturation", "1250m"),
    ],
)
def test_each_metric_has_its_figure(metric: str, value: str) -> None:
    assert get(metric, "pool=a").body["items"][0]["value"] == value


def test_in_shadow_the_present_number_is_told() -> None:
    pools = Pools({"llm/a": {"both": signal(wanted=8, told=3, shadow=True)}})
    assert get(pools=pools).body["items"][0]["value"] == "3"


def test_the_only_pool_of_a_namespace_need_not_be_named() -> None:
    assert get(namespace="chat").body["items"][0]["value"] == "9"


@pytest.mark.parametrize("value", ["0", "3", "500m", "1m", "12345678m"])
def test_quantities_read_back(value: str) -> None:
    number = float(value[:-1]) / 1000 if value.endswith("m") else float(value)
    assert quantity(number) == value


def test_what_there_is_is_discovered() -> None:
    groups = answer("/apis", "", POOLS, timestamp=NOW).body
    [group] = groups["groups"]
    assert group == answer("/apis/external.metrics.k8s.io", "", POOLS, timestamp=NOW).body
    assert f"{group['preferredVersion']['version']}.{group['name']}" == API_SERVICE_NAME
    listed = answer(f"{BASE}/", "", POOLS, timestamp=NOW).body
    assert (listed["kind"], listed["apiVersion"], listed["groupVersion"]) == (
        "APIResourceList",
        "v1",
        "external.metrics.k8s.io/v1beta1",
    )
    assert [each["name"] for each in listed["resources"]] == list(METRICS)
    assert all(each["namespaced"] and each["verbs"] == ["get"] for each in listed["resources"])


@pytest.mark.parametrize(
    ("given", "code", "reason", "words"),
    [
        ({"metric": "wanted"}, 404, "NotFound", "there is no metric 'wanted'; there are kvmesh-wanted-replicas, "),
        ({"selector": "pool=x"}, 404, "NotFound", "pool=a,role=both; pool=b,role=prefill; pool=b,role=decode"),
        ({"selector": "pool=a,role=decode"}, 404, "NotFound", "leaves nothing of what there is in 'llm'"),
        ({"namespace": "other"}, 404, "NotFound", "no pool of the namespace 'other' is known here"),
        (
            {"namespace": "empty"},
            404,
            "NotFound",
            "no policy's autoscale names a role of the namespace's pools (empty/a)",
        ),
        ({"selector": ""}, 400, "BadRequest", "leaves 3 series, which an autoscaler would add up"),
        ({"selector": "pool=b"}, 400, "BadRequest", "leaves 2 series"),
        ({"selector": "pol=a"}, 400, "BadRequest", "cannot be read: there is no label 'pol'"),
        ({"selector": "pool=llm/a"}, 400, "BadRequest", "cannot be read"),
        ({"pools": Pools()}, 503, "ServiceUnavailable", "no pool is known to this picker yet"),
    ],
)
def test_what_has_no_answer_says_what_there_is(given: dict[str, Any], code: int, reason: str, words: str) -> None:
    told = refusal(get(**given))
    assert told[:2] == (code, reason)
    assert words in told[2]


def test_nothing_is_served_at_other_paths() -> None:
    for path in ("/", "/openapi/v2", "/apis/apps/v1", f"{BASE}/namespaces/llm", f"{BASE}/namespaces/llm/a/b"):
        assert refusal(answer(path, "", POOLS, timestamp=NOW))[:2] == (404, "NotFound")


def test_a_pool_that_was_not_looked_at_has_no_number_yet() -> None:
    told = refusal(get(pools=Pools({"llm/a": {"both": None}})))
    assert told[0] == 503
    assert "this picker has not looked at it yet" in told[2]


@pytest.mark.parametrize(
    "state",
    [State.TOO_FEW_SAMPLES, State.CLOCK_JUMPED, State.NO_REPORTS, State.NO_READY_PODS, State.NONSENSE_REPORTS],
)
def test_a_number_that_rests_on_no_look_only_ever_asks_for_more_pods(state: State) -> None:
    def pods(told: int) -> Pools:
        return Pools({"llm/a": {"both": signal(state=state, told=told, present=3)}})

    assert get(pools=pods(4)).body["items"][0]["value"] == "4"
    for told in (2, 3):  # pods that have no address yet are not among those that are present
        code, _, words = refusal(get(pools=pods(told)))
        assert code == 503
        assert f"({state.value}: why)" in words


def test_figures_that_are_not_measured_are_not_answered_with_nothing() -> None:
    for state in State:
        pools = Pools({"llm/a": {"both": signal(state=state)}})
        measured = state in {State.OK, State.PROMISE_OUT_OF_REACH}
        for metric in set(METRICS) - {"kvmesh-wanted-replicas", "kvmesh-queued-tokens"}:
            assert (get(metric, pools=pools).code == 200) is measured
        waits = get("kvmesh-queued-tokens", pools=pools).code == 200
        assert waits is (measured or state is State.NO_READY_PODS)
    unknown = Pools({"llm/a": {"both": signal(saturation=None)}})
    assert "too few reports yet" in refusal(get("kvmesh-saturation", pools=unknown))[2]

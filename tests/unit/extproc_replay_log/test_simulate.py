"""What becomes of recorded requests under a policy: decided by the picker's own code, in virtual time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy
from extproc.replay_log.arrivals import Arrival
from extproc.replay_log.fates import ABANDONED, REFUSED, SERVED, Fate
from extproc.replay_log.simulate import Fleet, model_table, models_by_pod, simulate
from extproc.replay_log.simulated_pod import PodPace
from tests.unit.extproc_replay_log.recorded import line

PACE = PodPace(alone_seconds=0.02, seconds_a_prompt_token=0.0003, step_tokens=512, most_running=16)
SHEDS = {
    "priorities": {
        "classes": [{"name": "batch", "priority": -50, "sheddable": True, "ttftSeconds": 2.0, "queueSeconds": 4.0}]
    }
}


def arrival(number: int, at: float, **fields: Any) -> Arrival:
    given: dict[str, Any] = {
        "class_name": "standard",
        "tenant": "acme",
        "path": "/v1/completions",
        "api": "completions",
        "model": "tiny",
        "stream": True,
        "max_tokens": 64,
        "prompt_tokens": 1000,
        "cached_tokens": 0,
        "output_tokens": 16,
    }
    return Arrival(number=number, at=at, **{**given, **fields})


def load(count: int, *, a_second: float, **fields: Any) -> list[Arrival]:
    return [arrival(number, number / a_second, **fields) for number in range(count)]


def played(
    arrivals: Sequence[Arrival], document: Mapping[str, Any], *, pods: int = 2, by_rules: bool = False, **fleet: Any
) -> list[Fate]:
    policy, models = pick_policy(read_policy_file(document))
    addresses = tuple(f"10.0.0.{number + 1}:8000" for number in range(pods))
    given: dict[str, Any] = {"addresses": addresses, "pace": PACE, "models": {}}
    known = models if models.served else ModelTable(served=(ServedModel(name="tiny", tokens_from=TokensFrom.TEXT),))
    known = replace(known, rules=models.rules)
    return simulate(arrivals, policy=policy, models=known, fleet=Fleet(**{**given, **fleet}), by_rules=by_rules)


def outcomes(fates: Sequence[Fate]) -> Counter[str]:
    return Counter(fate.reason or fate.outcome for fate in fates)


def test_a_quiet_time_is_served_as_fast_as_the_pods_are() -> None:
    fates = played(load(20, a_second=0.5), {})
    assert outcomes(fates) == {SERVED: 20}
    # a prompt of 1,000 tokens takes two steps of 512, each token of the answer one more
    for fate in fates:
        assert fate.ttft_seconds == pytest.approx(1000 * 0.0003 + 2 * 0.02, rel=0.01)
        assert fate.inter_token_seconds == pytest.approx(0.02)
        assert fate.waited_seconds == 0.0


def test_what_is_cached_need_not_be_computed() -> None:
    cold, warm = played(load(1, a_second=1), {}), played(load(1, a_second=1, cached_tokens=900), {})
    assert cold[0].ttft_seconds is not None
    assert warm[0].ttft_seconds == pytest.approx(0.02 + 100 * 0.0003)


def test_of_too_much_load_the_sheddable_class_is_refused_and_the_other_waits() -> None:
    arrivals = load(150, a_second=10)  # two pods compute 6 prompts of 1,000 tokens a second
    mixed = [replace(each, class_name="batch") if each.number % 5 else each for each in arrivals]
    fates = played(mixed, SHEDS)
    by_class = {name: outcomes([fate for fate in fates if fate.class_name == name]) for name in ("standard", "batch")}
    assert by_class["standard"] == {SERVED: 30}
    assert by_class["batch"]["shed"] > 20
    assert by_class["batch"][SERVED] > 20
    waited = [fate.waited_seconds for fate in fates if fate.class_name == "batch" and fate.outcome == SERVED]
    assert 0.5 < max(waited) < 4.0
    assert outcomes(played(mixed, {"load": {"overload": {"enabled": False}}})) == {SERVED: 150}


def test_the_same_question_has_the_same_answer() -> None:
    arrivals = load(100, a_second=10, class_name="batch")
    assert played(arrivals, SHEDS) == played(arrivals, SHEDS)


def test_twice_the_pods_serve_what_one_half_refuses() -> None:
    arrivals = load(100, a_second=10, class_name="batch")
    refused = {pods: outcomes(played(arrivals, SHEDS, pods=pods))["shed"] for pods in (2, 4)}
    assert refused[2] > 20
    assert refused[4] == 0


def test_a_quota_refuses_what_is_beyond_it_and_each_tenant_has_its_own() -> None:
    arrivals = [replace(each, tenant="abc"[each.number % 3]) for each in load(60, a_second=1)]
    quotas = [
        {"tenant": "a", "requestsPerMinute": 5, "burstSeconds": 12},
        {"tenant": "b", "promptTokensPerMinute": 5000},
    ]
    fates = played(arrivals, {"quotas": quotas})
    refused = Counter(fate.tenant for fate in fates if fate.outcome == REFUSED)
    assert {fate.reason for fate in fates if fate.outcome == REFUSED} == {"quota-exceeded"}
    assert refused["c"] == 0
    assert 13 <= refused["a"] <= 15  # of 20 in a minute, 5 and what the burst has
    assert 11 <= refused["b"] <= 15  # 5,000 of 20,000 tokens


def test_generated_tokens_are_charged_as_they_really_came() -> None:
    quotas = [{"generatedTokensPerMinute": 600, "burstSeconds": 60}]
    arrivals = load(60, a_second=1, max_tokens=1000, output_tokens=8)
    # 600 are reserved of each, and 592 given back: without that one request in a minute would go
    assert outcomes(played(arrivals, {"quotas": quotas})) == {SERVED: 60}


def test_degradation_caps_the_output_under_pressure() -> None:
    steps = [{"step": "cap-output", "tokens": 4, "enter": 0.5, "leave": 0.2}]
    classes = [{"name": "batch", "sheddable": True, "ttftSeconds": 5, "degrade": steps}]
    arrivals = load(100, a_second=10, class_name="batch")
    fates = played(arrivals, {"priorities": {"classes": classes}})
    capped = [fate for fate in fates if fate.steps == ("cap-output",)]
    assert len(capped) > 10
    assert any(fate.outcome == SERVED and not fate.steps for fate in fates)


def test_in_shadow_nothing_is_refused_and_what_would_be_is_named() -> None:
    fates = played(load(100, a_second=10, class_name="batch"), {**SHEDS, "shadow": True})
    assert outcomes(fates) == {SERVED: 100}
    assert any(code.startswith("refuse:") for fate in fates for code in fate.withheld)


def test_a_log_may_have_years_without_a_request() -> None:
    year = 365 * 86400.0
    early, late = load(8, a_second=8.0), [arrival(8 + number, 50 * year + number / 8) for number in range(8)]
    fates = played([*early, *late], {})
    assert outcomes(fates) == {SERVED: 16}
    assert fates[8].ttft_seconds == pytest.approx(fates[0].ttft_seconds, abs=1e-3)


def test_a_client_leaves_when_its_patience_ends() -> None:
    arrivals = load(80, a_second=20)
    impatient = [replace(each, patience_seconds=1.0) if each.number >= 60 else each for each in arrivals]
    fates = played(impatient, {})
    left = [fate for fate in fates if fate.outcome == ABANDONED]
    assert len(left) > 5
    assert all(fate.waited_seconds <= 1.01 for fate in left)


def test_the_recorded_class_counts_unless_rules_are_to_decide() -> None:
    rules = [
        {"priorityClass": "critical", "headers": [{"name": "x", "value": "y"}]},
        {"priorityClass": "sheddable", "models": ["tiny"], "pathPrefix": "/v1/chat"},
    ]
    objectives = [{"name": "standard", "priorityClass": "critical"}]
    document = {"priorities": {"rules": rules, "objectives": objectives, "trustObjective": False}}
    chats = load(3, a_second=1, path="/v1/chat/completions", api="chat-completions")
    assert {fate.class_name for fate in played(chats, document)} == {"standard"}
    assert {fate.class_name for fate in played(chats, document, by_rules=True)} == {"sheddable"}
    texts = load(3, a_second=1)
    assert {fate.class_name for fate in played(texts, document, by_rules=True)} == {"standard"}
    unknown = load(3, a_second=1, class_name="gone")
    assert {fate.class_name for fate in played(unknown, document)} == {"standard"}


def test_model_rules_act_as_they_do_in_the_picker() -> None:
    listed = {"models": {"onlyListed": True, "served": [{"name": "big"}], "rules": []}}
    unlisted = played(load(3, a_second=1), listed)
    assert outcomes(unlisted) == {"unknown-model": 3}
    assert {fate.class_name for fate in unlisted} == {"standard"}
    renamed = {"models": {"served": [{"name": "big"}], "rules": [{"model": "tiny", "targets": [{"model": "big"}]}]}}
    assert outcomes(played(load(3, a_second=1), renamed)) == {SERVED: 3}


@pytest.mark.parametrize("api", ["chat-completions", "completions", "messages", "responses", "embeddings"])
def test_requests_of_all_apis_are_replayed(api: str) -> None:
    (fate,) = played([arrival(0, 0.0, api=api, path="/x", stream=False, max_tokens=None)], {})
    assert fate.outcome in (SERVED, REFUSED)
    paths = {"chat-completions": "/v1/chat/completions", "messages": "/v1/messages"}
    (fate,) = played([arrival(0, 0.0, api=api, path=paths.get(api, "/v1/completions"))], {})
    assert fate.outcome == SERVED
    assert fate.ttft_seconds == pytest.approx(0.34, rel=0.01)


def test_models_of_pods_are_those_that_they_served() -> None:
    one, two = line(0.0, served_model="a"), line(1.0, served_model="b", endpoint="10.0.0.2:8000")
    assert models_by_pod([one, line(1.0, served_model="a", endpoint="10.0.0.2:8000")]) == {}
    found = models_by_pod([one, two])
    assert {address: models.models for address, models in found.items()} == {
        "10.0.0.1:8000": {"a"},
        "10.0.0.2:8000": {"b"},
    }
    assert [each.name for each in model_table(ModelTable(), [one, two]).served] == ["a", "b"]

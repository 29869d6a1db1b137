"""llm-d's EndpointPickerConfig: what its plugins and profiles become, and what differs."""

from typing import Any

import pytest

from extproc.policy.values import SCORER_NAMES
from extproc.translation.endpoint_picker_config import COUNTERPARTS, SCORERS
from extproc.translation.translated import translated
from kvmesh.documents.document_files import DocumentFileError
from tests.unit.extproc_translation.foreign_policies import notes_of, policy_of, published, spec_of

PD_DECIDER = "prefix-based-pd-decider"


def config(*plugins: Any, profiles: Any = None, **sections: Any) -> dict[str, Any]:
    """Return a file with these plugins: types, or whole entries."""
    entries = [{"type": each} if isinstance(each, str) else each for each in plugins]
    head = {"apiVersion": "llm-d.ai/v1", "kind": "EndpointPickerConfig", "plugins": entries}
    named = [{"name": name, "plugins": references} for name, references in (profiles or {}).items()]
    return head | ({"schedulingProfiles": named} if profiles else {}) | sections


def test_the_published_prefill_decode_file_becomes_a_policy() -> None:
    limits = {"promptTokens": 16, "busyPromptTokens": 16}
    assert spec_of(published("llm_d_prefill_decode")) == {
        "scoring": {"strategy": "prefix-aware", "weights": {"kv-usage": 0, "prefix": 2, "queue-depth": 1}},
        "disaggregation": {"enabled": True, "protocol": "sidecar", "rule": "thresholds", **limits},
    }
    notes = notes_of(published("llm_d_prefill_decode"))
    assert [key for key, note in notes.items() if not note.became] == [
        "schedulingProfiles[prefill]",
        "plugins[approx-prefix-cache-producer].parameters",
    ]


def test_the_published_precise_prefix_file_becomes_a_policy() -> None:
    weights = {"prefix": 2.0, "kv-usage": 1.0, "queue-depth": 1.0}
    assert spec_of(published("llm_d_precise_prefix")) == {"scoring": {"strategy": "prefix-aware", "weights": weights}}
    assert policy_of(published("llm_d_precise_prefix")).weights == weights
    notes = notes_of(published("llm_d_precise_prefix"))
    assert [key for key, note in notes.items() if not note.became] == [
        "plugins[token-producer].parameters",
        "plugins[precise-prefix-cache-producer].parameters",
        "plugins[prefix-cache-scorer].parameters",
    ]


def test_every_plugin_of_a_file_has_a_note() -> None:
    names = [name for _, _, *names in COUNTERPARTS for name in names]
    assert len(names) == len(set(names))
    assert {f"plugins[{name}]" for name in names} <= notes_of(config(*names)).keys()


def test_weights_go_to_scorers_of_the_picker() -> None:
    assert {scorer for scorer, _ in SCORERS.values()} <= set(SCORER_NAMES)


def test_without_profiles_every_listed_scorer_weighs_one() -> None:
    plugins = ("running-requests-size-scorer", "active-request-scorer", "lora-affinity-scorer")
    assert policy_of(config(*plugins)).weights == {"active-requests": 2, "lora": 1}


def test_a_plugin_is_found_by_its_name_and_a_scorer_of_another_profile_has_no_effect() -> None:
    plugins = ({"name": "warm", "type": "prefix-cache-scorer"}, "queue-scorer")
    profiles = {"prefill": [{"pluginRef": "queue-scorer"}], "decode": [{"pluginRef": "warm", "weight": 3}]}
    found = config(*plugins, profiles=profiles)
    assert policy_of(found).weights == {"prefix": 3}
    assert notes_of(found)["plugins[queue-scorer]"].difference == "no effect outside of the profile that picks"


def test_a_file_without_a_known_scorer_keeps_the_default() -> None:
    found = config(
        "latency-scorer", "their-own-scorer", featureGates=["flowControl"], flowControl={"maxRequests": "1k"}
    )
    assert spec_of(found) == {}
    differences = {key: note.difference for key, note in notes_of(found).items()}
    assert differences == {
        "schedulingProfiles[default]": "none of its scorers has a counterpart: the default `kv-aware` picks",
        "plugins[latency-scorer]": "TTFT is estimated without training",
        "plugins[their-own-scorer]": "no counterpart is known; a scorer of your own package can be one",
        "featureGates[flowControl]": "write `load.overload` and `priorities.classes`; queues are on by default",
        "flowControl": "write `load.overload` and `priorities.classes`; queues are on by default",
    }


@pytest.mark.parametrize(
    ("decider", "disaggregation"),
    [
        ("always-disagg-pd-decider", {"enabled": True, "rule": "always"}),
        (PD_DECIDER, {"enabled": False}),
        ({"type": PD_DECIDER, "parameters": {"nonCachedTokens": 0}}, {"enabled": False}),
    ],
    ids=["always", "never by default", "never"],
)
def test_the_decider_is_the_rule(decider: Any, disaggregation: dict[str, Any]) -> None:
    handler = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "x"}, "stageOrder": "x"}}
    found = config(decider, handler)
    assert spec_of(found)["disaggregation"] == {"protocol": "sidecar", **disaggregation}
    assert notes_of(found)["plugins[disagg-profile-handler].parameters"].difference == "not read: stageOrder"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (config() | {"apiVersion": "llm-d.ai/v2"}, "apiVersion: must be one of llm-d.ai/v1, "),
        (config({"type": "queue-scorer", "paramters": {}}), "plugins[0].paramters: unknown field; the nearest "),
        (config({"name": "a"}), "plugins[0].type: is missing"),
        (config("queue-scorer", "queue-scorer"), "plugins[1]: 'queue-scorer' is already the name of a plugin"),
        (
            config("queue-scorer", profiles={"default": [{"pluginRef": "queue-scorr"}]}),
            "schedulingProfiles[0].plugins[0].pluginRef: 'queue-scorr' is no plugin of this file; the nearest valid",
        ),
        (
            config("queue-scorer", profiles={"default": [{"pluginRef": "queue-scorer", "weight": -1}]}),
            "schedulingProfiles[0].plugins[0].weight: must be between 0 and 1000000, not -1",
        ),
        (
            config({"type": PD_DECIDER, "parameters": {"nonCachedTokens": "many"}}),
            "plugins[prefix-based-pd-decider].parameters.nonCachedTokens: must be a whole number",
        ),
        (
            config(schedulingProfile=[]),
            "schedulingProfile: unknown field; the nearest valid one is 'schedulingProfiles'",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_wrong_file_is_refused_with_the_path_of_its_field(value: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentFileError) as refused:
        translated(value, name="theirs")
    assert str(refused.value).startswith(message)

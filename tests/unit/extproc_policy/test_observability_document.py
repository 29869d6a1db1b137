"""What the operator wants to be shown: read from the file and from the resource alike, and wrong values are refused."""

from typing import Any

import pytest

from extproc.errors import ConfigError
from extproc.policy.document import parse_policy
from extproc.policy.inference_policy import PolicyDocumentError, parse_inference_policy, pick_policy
from extproc.policy.observability import ObservabilityPolicy
from extproc.policy.values import PickPolicy
from tests.unit.extproc_policy.policy_documents import policy

GIVEN = {"audit_share": 0.25, "show_prompt_text": True, "gpu_hour_price": 2.5, "currency": "EUR"}
WRITTEN = {"auditShare": 0.25, "showPromptText": True, "gpuHourPrice": 2.5, "currency": "EUR"}
MEANT = ObservabilityPolicy(audit_share=0.25, show_prompt_text=True, gpu_hour_price=2.5, currency="EUR")


def test_without_a_word_all_is_written_down_and_no_text_and_no_money_is_shown() -> None:
    assert PickPolicy().observability == ObservabilityPolicy(
        audit_share=1.0, show_prompt_text=False, gpu_hour_price=0.0, currency="USD"
    )


def test_the_file_says_what_is_meant() -> None:
    assert parse_policy({"observability": GIVEN}).observability == MEANT


def test_the_resource_says_the_same_and_its_sample_share_goes_its_own_way() -> None:
    fields = parse_inference_policy(policy({"observability": WRITTEN | {"sampleShare": 0.5}})).fields
    assert fields == {"policy": {"observability": GIVEN}, "sample_share": 0.5}
    assert pick_policy(fields)[0].observability == MEANT


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"audit_share": 1.5}, "policy.observability.audit_share: must be between 0 and 1"),
        ({"gpu_hour_price": -1}, "policy.observability.gpu_hour_price: must be a number >= 0"),
        ({"currency": "US Dollar"}, "policy.observability.currency: must be 1 to 8 letters"),
        ({"currency": ""}, "policy.observability.currency: must be 1 to 8 letters"),
        ({"currency": 'a"b'}, "policy.observability.currency: must be 1 to 8 letters"),
        ({"show_prompt_text": "yes"}, "policy.observability.show_prompt_text: expected `bool`"),
        ({"sample_share": 1}, "policy.observability.sample_share: unknown field"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy({"observability": given})
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    "given",
    [{"auditShare": 2}, {"gpuHourPrice": -0.1}, {"currency": "waytoolong"}, {"currency": "$"}, {"showPromptText": 1}],
)
def test_a_mistake_in_the_resource_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PolicyDocumentError) as caught:
        parse_inference_policy(policy({"observability": given}))
    assert str(caught.value).startswith(f"spec.observability.{next(iter(given))}")

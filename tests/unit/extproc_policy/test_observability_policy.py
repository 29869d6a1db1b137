"""What the operator wants to be shown is read from a policy, and wrong values are refused."""

from typing import Any

import pytest

from extproc.policy.inference_policy import read_spec
from extproc.policy.merged_policy import pick_policy
from extproc.policy.reading import PolicyDocumentError
from extproc.policy.values import ObservabilityPolicy, PickPolicy


def test_by_default_all_is_written_down_and_no_text_and_no_money_is_shown() -> None:
    assert PickPolicy().observability == ObservabilityPolicy(
        sample_share=None, audit_share=1.0, show_prompt_text=False, pod_hour_price=0.0, currency="USD"
    )


def test_the_policy_says_what_is_meant() -> None:
    given = {"sampleShare": 0.5, "auditShare": 0.25, "showPromptText": True, "podHourPrice": 2.5, "currency": "EUR"}
    assert pick_policy(read_spec({"observability": given}))[0].observability == ObservabilityPolicy(
        sample_share=0.5, audit_share=0.25, show_prompt_text=True, pod_hour_price=2.5, currency="EUR"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"auditShare": 2}, "auditShare: must be between 0 and 1, not 2"),
        ({"podHourPrice": -0.1}, "podHourPrice: must be between 0 and 1000000, not -0.1"),
        ({"currency": "waytoolong"}, "currency: must have 1 to 8 characters, not 10"),
        ({"currency": ""}, "currency: must have 1 to 8 characters, not 0"),
        ({"currency": "$"}, 'currency: must be letters, not "$"'),
        ({"showPromptText": 1}, "showPromptText: must be true or false, not 1"),
        ({"sampleshare": 1}, "sampleshare: unknown field; the nearest valid one is 'sampleShare'"),
    ],
)
def test_a_mistake_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyDocumentError) as caught:
        read_spec({"observability": given})
    assert str(caught.value) == f"spec.observability.{words}"

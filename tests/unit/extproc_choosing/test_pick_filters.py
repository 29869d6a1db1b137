"""Which endpoints may serve a request, and which filters give way rather than leave nobody."""

from typing import Any

import pytest

from extproc.choosing.decision import apply_filters
from extproc.errors import NoReadyEndpointError
from extproc.pods.endpoint import Ask, Candidate, Reachability, Role
from extproc.policy.values import PickPolicy
from tests.unit.extproc_choosing.pick_candidates import candidate, decided, serving

ASK = Ask(model="m", prompt_tokens=1000, subset=frozenset({"a", "b"}))
BAD: list[tuple[str, dict[str, Any]]] = [
    ("ready: unreachable", {"reachability": Reachability.UNREACHABLE}),
    ("cordoned: closed by the policy", {"cordoned": True}),
    ("role: computes prompts for others", {"role": Role.PREFILL}),
    ("model: does not serve the model", {"models": serving("other", adapters=("lora",))}),
    ("context-length: takes 1000 tokens, the prompt has 1000", {"models": serving("m", max_model_len=1000)}),
    ("healthy: 5 of 5 requests failed", {"unhealthy": "5 of 5 requests failed"}),
]


def bad(address: str, facts: dict[str, Any]) -> Candidate:
    return candidate(address, **facts)


@pytest.mark.parametrize(("words", "facts"), BAD, ids=[words.partition(":")[0] for words, _ in BAD])
def test_an_endpoint_that_cannot_serve_the_request_is_left_out_and_named(words: str, facts: dict[str, Any]) -> None:
    kept, rejected, _ = apply_filters([candidate("a"), bad("b", facts)], ask=ASK)
    assert ([c.address for c in kept], rejected) == (["a"], {"b": words})


def test_only_endpoints_of_the_route_s_subset_may_serve() -> None:
    kept, rejected, _ = apply_filters([candidate("a"), candidate("c")], ask=ASK)
    assert ([c.address for c in kept], rejected) == (["a"], {"c": "subset: not in the route's subset"})


@pytest.mark.parametrize(("words", "facts"), BAD[:3], ids=["ready", "cordoned", "role"])
def test_a_filter_that_rests_on_facts_leaves_nobody_rather_than_somebody_wrong(
    words: str, facts: dict[str, Any]
) -> None:
    with pytest.raises(NoReadyEndpointError):
        decided([bad("a", facts)], policy=PickPolicy(), ask=ASK, prompt_tokens=0, degraded={}, tie_break=lambda: 0.0)


def test_an_empty_subset_leaves_nobody() -> None:
    with pytest.raises(NoReadyEndpointError, match="not in the route's subset"):
        decided(
            [candidate("a")],
            policy=PickPolicy(),
            ask=Ask(subset=frozenset()),
            prompt_tokens=0,
            degraded={},
            tie_break=lambda: 0.0,
        )


@pytest.mark.parametrize(("words", "facts"), BAD[3:], ids=["model", "context-length", "healthy"])
def test_a_filter_that_may_be_wrong_gives_way_where_it_would_leave_nobody(words: str, facts: dict[str, Any]) -> None:
    kept, rejected, _ = apply_filters([bad("a", facts), bad("b", facts)], ask=ASK)
    assert ([c.address for c in kept], rejected) == (["a", "b"], {})


def test_a_strict_filter_does_not_give_way() -> None:
    kept, *_ = apply_filters([bad("a", {"models": serving("other")})], ask=ASK, strict=frozenset({"model"}))
    assert kept == []


@pytest.mark.parametrize(
    ("ask", "facts"),
    [
        (Ask(model="m"), {"models": None}),
        (Ask(model=None), {"models": serving("other")}),
        (Ask(model="lora"), {"models": serving("m", adapters=("lora",))}),
        (Ask(model="m", prompt_tokens=999), {"models": serving("m", max_model_len=1000)}),
        (Ask(model="m", prompt_tokens=5000), {"models": serving("m")}),
    ],
    ids=["not-told", "no-model-asked", "adapter", "fits", "length-not-told"],
)
def test_what_is_not_known_is_no_reason_to_leave_an_endpoint_out(ask: Ask, facts: dict[str, Any]) -> None:
    other = candidate("b", models=serving("m", "other", max_model_len=9999))
    kept, *_ = apply_filters([bad("a", facts), other], ask=ask, strict=frozenset({"model", "context-length"}))
    assert "a" in [c.address for c in kept]


def test_the_configured_context_length_counts_where_the_pod_does_not_tell() -> None:
    ask = Ask(prompt_tokens=100, max_model_len=100)
    kept, *_ = apply_filters([candidate("a"), candidate("b", models=serving("m", max_model_len=200))], ask=ask)
    assert [c.address for c in kept] == ["b"]

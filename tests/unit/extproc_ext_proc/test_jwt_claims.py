"""Claims come from what Envoy's jwt_authn filter left; whatever is no plain claim is absent."""

from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from hypothesis import given
from hypothesis import strategies as st

from extproc.ext_proc import answers as ext_proc
from extproc.ext_proc.answers import verified_claims
from tests.unit.extproc_ext_proc.envoy_message import read_headers

NAMESPACE = "envoy.filters.http.jwt_authn"


def message(payload: dict[str, Any], *, key: str = "payload", namespace: str = NAMESPACE) -> ProcessingRequest:
    made = ProcessingRequest()
    made.metadata_context.filter_metadata[namespace].update({key: payload})
    return made


def claims(payload: dict[str, Any], *names: str, **where: str) -> dict[str, str]:
    metadata = message(payload, **where).metadata_context.filter_metadata
    return dict(verified_claims(metadata, frozenset(names)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("gold", "gold"),
        (7, "7"),
        (1.5, "1.5"),
        (True, "true"),
        (False, "false"),
        (["a", "b", 3], "a\nb\n3"),
        (["only"], "only"),
    ],
)
def test_a_claim_is_a_text(value: Any, text: str) -> None:
    assert claims({"c": value}, "c") == {"c": text}


@pytest.mark.parametrize("value", ["", None, {}, {"a": "b"}, [], [None, {}], "two\nlines", ["two\nlines"], "x" * 4097])
def test_a_malformed_claim_is_absent(value: Any) -> None:
    assert claims({"c": value, "other": "1"}, "c", "other") == {"other": "1"}


def test_scope_is_a_list_in_one_text_and_no_other_claim_is() -> None:
    assert claims({"scope": "read write", "name": "read write"}, "scope", "name") == {
        "scope": "read\nwrite",
        "name": "read write",
    }


def test_a_dot_leads_deeper_unless_the_claim_is_called_so() -> None:
    payload = {
        "realm": {"roles": ["a"], "more": {"tier": "1"}},
        "https://example.com/tier": "gold",
        "https://example.com/org": {"id": "acme"},
        "realm.x": "flat",
    }
    names = ("realm.roles", "realm.more.tier", "https://example.com/tier", "https://example.com/org.id", "realm.x")
    assert claims(payload, *names) == dict(zip(names, ("a", "1", "gold", "acme", "flat"), strict=True))
    assert claims(payload, "realm", "realm.", "realm.roles.a", "realm.none", ".", "") == {}


@pytest.mark.parametrize("key", ["payload", "https://issuer.example", "anything"])
def test_the_payload_may_lie_under_any_key(key: str) -> None:
    assert claims({"sub": "me"}, "sub", key=key) == {"sub": "me"}


def test_of_two_tokens_the_same_one_counts_each_time() -> None:
    made = message({"sub": "second"}, key="b")
    made.metadata_context.filter_metadata[NAMESPACE].update({"a": {"sub": "first"}, "c": "no payload"})
    assert verified_claims(made.metadata_context.filter_metadata, frozenset({"sub"})) == {"sub": "first"}


def test_claims_of_another_filter_are_not_believed() -> None:
    assert claims({"sub": "me"}, "sub", namespace="envoy.filters.http.lua") == {}


def test_a_request_s_facts_hold_the_claims_that_were_asked_for() -> None:
    made = message({"sub": "me", "tier": "gold"})
    assert ext_proc.request_facts(read_headers(made), claims=frozenset({"tier", "absent"})).claims == {"tier": "gold"}
    assert ext_proc.request_facts(read_headers(made)).claims == {}


JSON = st.recursive(
    st.sampled_from([None, True, False, 0.5, -1e300, 2.0**60, "", "a", "a b", " ", "\n", "\0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "a.b"]), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.thorough
@given(
    payload=st.dictionaries(st.sampled_from(["a", "b", "a.b", "scope"]), JSON),
    name=st.sampled_from(["a", "b", "a.b", "a.b.a", "scope", "a..b"]),
)
def test_no_payload_is_an_error_and_no_absent_claim_has_a_text(payload: dict[str, Any], name: str) -> None:
    found = claims(payload, name)
    assert all(key == name and text for key, text in found.items())

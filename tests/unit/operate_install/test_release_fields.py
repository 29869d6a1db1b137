"""An older istiod drops fields that it does not know, in silence, and an older proxy could not take them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from operate.install.plan import BodyMode, Mode
from operate.install.render import render
from tests.unit.operate_install.sample_plans import MODES, RELEASES, plan

# the first minor release whose istiod knows a field, by the go-control-plane commit in the tag's go.mod
FIRST_KNOWN: Mapping[str, int] = {
    "status_on_error": 28,
    "processing_request_modifier": 28,
    "request_body_buffer_limit": 28,
    "hash_policy": 29,
    "allow_content_length_header": 30,
    "selected_host_key": 30,
}


def fields_in(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from value
        for each in value.values():
            yield from fields_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from fields_in(each)


@pytest.mark.parametrize("body_mode", BodyMode)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("minor", RELEASES)
def test_a_release_gets_only_fields_that_it_knows(minor: int, mode: Mode, body_mode: BodyMode) -> None:
    rendered = render(plan(minor, mode, body_mode=body_mode))
    used = {name for document in rendered if document["kind"] == "EnvoyFilter" for name in fields_in(document)}
    assert "status_on_error" in used
    assert {name for name in used if FIRST_KNOWN.get(name, 0) > minor} == set()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("minor", RELEASES)
def test_a_proxy_gets_all_patches_or_none_and_a_client_s_none_for_what_comes_in(minor: int, mode: Mode) -> None:
    filters = [each for each in render(plan(minor, mode)) if each["kind"] == "EnvoyFilter"]
    matches = [patch["match"] for each in filters for patch in each["spec"]["configPatches"]]
    assert {match["context"] for match in matches} == {"SIDECAR_OUTBOUND" if mode is Mode.SIDECAR else "GATEWAY"}
    for proxy in range(27, minor + 4):
        taken = {re.search(match["proxy"]["proxyVersion"], f"1.{proxy}.0") is not None for match in matches}
        assert taken == {proxy >= RELEASES[0]}

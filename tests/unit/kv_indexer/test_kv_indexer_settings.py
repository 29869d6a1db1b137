"""What the indexer can be told, and how it answers nonsense."""

from typing import Any

import pytest

from kv_indexer.config import parse_endpoints, parse_event_sources, unique_indexer_id
from kvmesh.blocks.source import EventAddresses, reachable
from kvmesh.errors import SettingError


def test_endpoints_are_a_list_or_separated_by_commas() -> None:
    assert parse_endpoints("a:1, [::1]:2,") == parse_endpoints(["a:1", "[::1]:2"]) == ("a:1", "[::1]:2")


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:70000", "a:x", "::1:80", "a:1,a:1"])
def test_a_malformed_endpoint_is_refused(text: str) -> None:
    with pytest.raises(SettingError):
        parse_endpoints(text)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://*:5557", "tcp://10.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557"),
        ("tcp://[::]:5557", "tcp://10.0.0.1:5557"),
        ("tcp://10.9.9.9:5557", "tcp://10.9.9.9:5557"),
        ("ipc:///run/events", "ipc:///run/events"),
    ],
)
def test_a_wildcard_becomes_the_pods_host(address: str, expected: str) -> None:
    found = reachable(address, address, host="10.0.0.1")
    assert (found.events, found.replay) == (expected, expected)


def test_event_sources_are_json_or_a_mapping_with_one_entry_a_rank() -> None:
    text = '{"10.0.0.1:80": {"events": "tcp://*:5", "replay": "tcp://*:6"}, "b:1": [{"events": "tcp://c:5"}]}'

    assert parse_event_sources(text) == {
        "10.0.0.1:80": (EventAddresses(events="tcp://10.0.0.1:5", replay="tcp://10.0.0.1:6"),),
        "b:1": (EventAddresses(events="tcp://c:5"),),
    }


@pytest.mark.parametrize("value", ["", "  ", "{}", "null", {}, None])
def test_an_empty_value_names_no_event_source(value: Any) -> None:
    assert parse_event_sources(value) == {}


@pytest.mark.parametrize(
    "value",
    [
        "{",
        "[]",
        '{"a": {"events": "tcp://b:1"}}',
        '{"a:1": {}}',
        '{"a:1": {"events": 5}}',
        '{"a:1": {"events": "b:1"}}',
    ],
)
def test_a_malformed_event_source_is_refused(value: Any) -> None:
    with pytest.raises(SettingError):
        parse_event_sources(value)


@pytest.mark.parametrize("name", ["", "indexer-0", "10.0.0.1:9091", "x" * 64])
def test_two_indexers_of_one_name_are_told_apart(name: str) -> None:
    ids = {unique_indexer_id(name) for _ in range(3)}

    assert len(ids) == 3
    assert not name or {each.rpartition("-")[0] for each in ids} == {name}


@pytest.mark.parametrize("name", ["a b", "a\n", "#", "x" * 65])
def test_an_indexer_name_that_would_spoil_logs_and_tables_is_refused(name: str) -> None:
    with pytest.raises(SettingError):
        unique_indexer_id(name)

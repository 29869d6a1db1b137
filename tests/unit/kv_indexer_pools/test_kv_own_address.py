"""Which of the addresses that pods announce are their own."""

import pytest

from kv_indexer.config import parse_ports
from kv_indexer.pools.event_sources import own_address
from kvmesh.errors import NoEventSourceError, SettingError


@pytest.mark.parametrize(
    ("announced", "endpoint", "own"),
    [
        ("tcp://*:5557", "10.0.0.1:8000", "tcp://10.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.1:8000", "tcp://10.0.0.1:5557"),
        ("tcp://10.0.0.1:5557", "10.0.0.1:8000", "tcp://10.0.0.1:5557"),
        ("tcp://[::]:5557", "[fd00::1]:8000", "tcp://[fd00::1]:5557"),
        ("tcp://[fd00:0::1]:5557", "[fd00::1]:8000", "tcp://[fd00::1]:5557"),
        ("tcp://VLLM-0:5557", "vllm-0:8000", "tcp://vllm-0:5557"),
        # one spelling for each, so that no two pods can have the same under two names
        ("tcp://localhost:5557", "127.0.0.1:8000", "tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:5557", "localhost:8000", "tcp://localhost:5557"),
        ("tcp://*:05557", "10.0.0.1:8000", "tcp://10.0.0.1:5557"),
    ],
)
def test_its_own_address_has_the_host_that_it_is_reached_at(announced: str, endpoint: str, own: str) -> None:
    assert own_address(announced, endpoint=endpoint, ports=range(1024, 65536)) == own


@pytest.mark.parametrize(
    "announced",
    [
        "ipc:///tmp/other",
        "inproc://x",
        "pgm://10.0.0.1:5557",
        "tcp://10.0.0.2:5557",
        "tcp://127.0.0.1:5557",
        "tcp://localhost:5557",
        "tcp://redis:6379",
        "tcp://10.0.0.9;10.0.0.1:5557",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:1023",
        "tcp://10.0.0.1:6001",
        "tcp://10.0.0.1:99999",
        "tcp://10.0.0.1:٥٥٥٧",
        "tcp://10.0.0.1:-1",
        "tcp://10.0.0.1:*",
        "tcp://10.0.0.1:5557:5558",
        "",
        "x" * 100_000,
    ],
)
def test_anything_else_is_refused_in_a_line(announced: str) -> None:
    with pytest.raises(NoEventSourceError) as refused:
        own_address(announced, endpoint="10.0.0.1:8000", ports=range(1024, 6001))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(("text", "ports"), [("5557-5700", range(5557, 5701)), ("5557", range(5557, 5558))])
def test_a_range_of_ports_is_read(text: str, ports: range) -> None:
    assert parse_ports(text) == ports


@pytest.mark.parametrize("text", ["", "-", "5700-5557", "0-10", "1-65536", "a-b", "1-2-3", "٥"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="are not LOW-HIGH"):
        parse_ports(text)

"""How an Envoy file gets the addresses of one run."""

import copy
from typing import Any

import pytest

from operate.local.envoy_config import SocketAddress, fill_in, read_template
from operate.local.errors import BrokenTemplateError

GATEWAY = SocketAddress(host="127.0.0.1", port=1)
ADMIN = SocketAddress(host="127.0.0.1", port=2)
PICKER = SocketAddress(host="127.0.0.1", port=3)
PODS = (SocketAddress(host="10.0.0.1", port=8000), SocketAddress(host="::1", port=8001))


def filled(template: dict[str, Any]) -> dict[str, Any]:
    return fill_in(template, gateway=GATEWAY, admin=ADMIN, picker=PICKER, pods=PODS)


def socket(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


@pytest.mark.parametrize("name", ["local.yaml", "buffered.yaml"])
def test_addresses_and_pods_are_replaced_and_nothing_else(name: str) -> None:
    template = read_template(name)
    before = copy.deepcopy(template)

    config = filled(template)

    assert template == before
    expected = copy.deepcopy(before)
    expected["admin"]["address"] = socket("127.0.0.1", 1 + 1)
    expected["static_resources"]["listeners"][0]["address"] = socket("127.0.0.1", 1)
    picker, pods = expected["static_resources"]["clusters"]
    picker["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": socket("127.0.0.1", 3)}}]}]
    pods["load_assignment"]["endpoints"] = [
        {"lb_endpoints": [{"endpoint": {"address": socket(pod.host, pod.port)}} for pod in PODS]}
    ]
    assert config == expected


def test_a_file_without_a_list_of_pods_is_refused() -> None:
    with pytest.raises(BrokenTemplateError, match="'pods' has no list of endpoints"):
        filled(read_template("original-dst.yaml"))


def test_a_file_without_the_expected_listener_is_refused() -> None:
    template = read_template("local.yaml")
    template["static_resources"]["listeners"][0]["name"] = "other"

    with pytest.raises(BrokenTemplateError, match="no part named 'gateway'"):
        filled(template)


@pytest.mark.parametrize("text", ["127.0.0.1:8101", "[2001:db8::1]:8000"])
def test_an_address_reads_as_it_was_written(text: str) -> None:
    assert str(SocketAddress.parse(text)) == text

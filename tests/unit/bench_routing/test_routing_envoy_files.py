"""The arms' Envoy differs from the product's in what the arm says, and in nothing else."""

from typing import Any

from bench.routing.arms import ARMS, STANDARD, STRATEGIES, Kind
from bench.routing.envoy_files import with_pickers, without_picker
from bench.routing.subject import Subject
from operate.local.envoy_config import SocketAddress, fill_in

TEMPLATE = Subject().envoy_template()
GATEWAY, ADMIN = SocketAddress(host="127.0.0.1", port=1), SocketAddress(host="127.0.0.1", port=2)
PICKERS = [SocketAddress(host="127.0.0.1", port=port) for port in (11, 12, 13)]
PODS = [SocketAddress(host="127.0.0.1", port=port) for port in (21, 22)]


def cluster(config: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in config["static_resources"]["clusters"] if one["name"] == name)


def ports(part: dict[str, Any]) -> list[int]:
    (locality,) = part["load_assignment"]["endpoints"]
    return [one["endpoint"]["address"]["socket_address"]["port_value"] for one in locality["lb_endpoints"]]


def test_one_picker_is_the_products_own_file() -> None:
    config = with_pickers(TEMPLATE, gateway=GATEWAY, admin=ADMIN, pickers=PICKERS[:1], pods=PODS)

    assert config == fill_in(TEMPLATE, gateway=GATEWAY, admin=ADMIN, picker=PICKERS[0], pods=PODS)


def test_several_pickers_are_one_cluster() -> None:
    config = with_pickers(TEMPLATE, gateway=GATEWAY, admin=ADMIN, pickers=PICKERS, pods=PODS)

    assert ports(cluster(config, "picker")) == [11, 12, 13]


def test_a_plain_arm_has_no_picker_and_its_own_balancing() -> None:
    balancing = ARMS["round-robin"].balancing
    assert balancing is not None
    config = without_picker(TEMPLATE, gateway=GATEWAY, admin=ADMIN, balancing=balancing, pods=PODS)

    assert "ext_proc" not in str(config["static_resources"]["listeners"])
    assert [one["name"] for one in config["static_resources"]["clusters"]] == [
        one["name"] for one in TEMPLATE["static_resources"]["clusters"] if one["name"] != "picker"
    ]
    assert cluster(config, "pods")["load_balancing_policy"] == balancing
    assert ports(cluster(config, "pods")) == [21, 22]


def test_the_standard_arms_exist_and_the_baseline_is_among_them() -> None:
    assert set(STANDARD) <= set(ARMS)
    assert STANDARD[0] == "round-robin"
    assert {ARMS[name].kind for name in STANDARD} == set(Kind)
    assert {f"kvmesh:{strategy}" for strategy in STRATEGIES} <= set(ARMS)

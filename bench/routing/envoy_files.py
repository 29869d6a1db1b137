"""Envoy's configuration for an arm: the product's own `envoy/local.yaml`, with or without the picker in it.

Called by `stack`. Plain arms differ in two places only: no ext_proc filter, and another load balancing policy.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from operate.local.envoy_config import GATEWAY_LISTENER, PICKER_CLUSTER, PODS_CLUSTER, SocketAddress, fill_in, named


def with_pickers(
    template: dict[str, Any],
    *,
    gateway: SocketAddress,
    admin: SocketAddress,
    pickers: Sequence[SocketAddress],
    pods: Sequence[SocketAddress],
) -> dict[str, Any]:
    """The product's file; with several pickers Envoy takes them in turn, request by request."""
    config = fill_in(template, gateway=gateway, admin=admin, picker=pickers[0], pods=pods)
    assignment = named(config["static_resources"]["clusters"], PICKER_CLUSTER)["load_assignment"]
    assignment["endpoints"] = [
        {
            "lb_endpoints": [
                {"endpoint": {"address": {"socket_address": {"address": one.host, "port_value": one.port}}}}
                for one in pickers
            ]
        }
    ]
    return config


def without_picker(
    template: dict[str, Any],
    *,
    gateway: SocketAddress,
    admin: SocketAddress,
    balancing: Mapping[str, Any],
    pods: Sequence[SocketAddress],
) -> dict[str, Any]:
    """The same file without ext_proc, and `balancing` as the pods' load balancing policy."""
    config = fill_in(template, gateway=gateway, admin=admin, picker=gateway, pods=pods)
    resources = config["static_resources"]
    manager = named(resources["listeners"], GATEWAY_LISTENER)["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [part for part in manager["http_filters"] if "ext_proc" not in part["name"]]
    resources["clusters"] = [part for part in resources["clusters"] if part["name"] != PICKER_CLUSTER]
    named(resources["clusters"], PODS_CLUSTER)["load_balancing_policy"] = dict(balancing)
    return config

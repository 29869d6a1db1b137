"""One Envoy with three listeners: the product's own configuration, the same before a bare picker, and without any.

Called by `stage`. The listeners share Envoy's process, its worker threads and the cluster of pods.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operate.local.envoy_config import PICKER_CLUSTER, SocketAddress, fill_in, named, read_template
from operate.local.processes import HttpReady, ProcessSpec, find_envoy

BARE_LISTENER = "bare"
BARE_CLUSTER = "bare-picker"
DIRECT_LISTENER = "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyAddresses:
    """Where the bench's Envoy listens: before the picker, the bare picker, no picker; and its admin page."""

    picker: SocketAddress
    bare: SocketAddress
    direct: SocketAddress
    admin: SocketAddress


def three_route_config(
    template: dict[str, Any],
    *,
    addresses: EnvoyAddresses,
    picker: SocketAddress,
    bare_picker: SocketAddress,
    pods: Sequence[SocketAddress],
) -> dict[str, Any]:
    """`envoy/local.yaml` with a second listener that asks another picker, and a third that asks none.

    Without metadata the pods' cluster falls back to its own load balancing, which spreads the requests.
    """
    config = fill_in(template, gateway=addresses.picker, admin=addresses.admin, picker=picker, pods=pods)
    second = fill_in(template, gateway=addresses.bare, admin=addresses.admin, picker=bare_picker, pods=pods)
    bare, manager = _renamed(second["static_resources"]["listeners"], BARE_LISTENER)
    _picking(manager)["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = BARE_CLUSTER
    cluster = named(second["static_resources"]["clusters"], PICKER_CLUSTER)
    cluster["name"] = cluster["load_assignment"]["cluster_name"] = BARE_CLUSTER
    direct, manager = _renamed(config["static_resources"]["listeners"], DIRECT_LISTENER)
    direct["address"] = {"socket_address": {"address": addresses.direct.host, "port_value": addresses.direct.port}}
    manager["http_filters"] = [part for part in manager["http_filters"] if "kvmesh" not in part["name"]]
    config["static_resources"]["listeners"] += [bare, direct]
    config["static_resources"]["clusters"].append(cluster)
    return config


def _renamed(listeners: list[dict[str, Any]], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of the product's listener under another name, and its HTTP connection manager."""
    listener = copy.deepcopy(named(listeners, "gateway"))
    manager: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    listener["name"] = manager["stat_prefix"] = name
    return listener, manager


def _picking(manager: dict[str, Any]) -> dict[str, Any]:
    """The filter that asks for a pick; the other one is for responses that the picker has left a note for."""
    filters: list[dict[str, Any]] = manager["http_filters"]
    return named(filters, "envoy.filters.http.ext_proc.kvmesh")


def envoy_process(
    *,
    addresses: EnvoyAddresses,
    picker: SocketAddress,
    bare_picker: SocketAddress,
    pods: Sequence[SocketAddress],
    directory: Path,
) -> ProcessSpec:
    """The process, started like the one of `kvmesh up`."""
    config = three_route_config(
        read_template("local.yaml"), addresses=addresses, picker=picker, bare_picker=bare_picker, pods=pods
    )
    file = directory / "bench-envoy.json"
    file.write_text(json.dumps(config))
    return ProcessSpec(
        name="envoy",
        argv=(
            *(str(find_envoy()), "-c", str(file), "--log-level", "warning"),
            *("--disable-hot-restart", "--concurrency", "2"),
        ),
        ready=(HttpReady(url=f"http://{addresses.admin}/ready"),),
    )

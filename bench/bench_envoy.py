"""One Envoy with two listeners: the product's own configuration, and the same without the picker."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extproc.local.envoy_config import SocketAddress, fill_in, named, read_template
from extproc.local.processes import ProcessSpec
from extproc.local.programs import find_envoy
from extproc.local.readiness import HttpReady

DIRECT_LISTENER = "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyAddresses:
    """Where the bench's Envoy listens: with the picker, without it, and its admin page."""

    picked: SocketAddress
    direct: SocketAddress
    admin: SocketAddress


def two_route_config(
    template: dict[str, Any], *, addresses: EnvoyAddresses, picker: SocketAddress, pods: Sequence[SocketAddress]
) -> dict[str, Any]:
    """`envoy/local.yaml` with a second listener whose only difference is that ext_proc is missing.

    Without metadata the pods' cluster falls back to its own load balancing, which spreads the requests.
    """
    config = fill_in(template, gateway=addresses.picked, admin=addresses.admin, picker=picker, pods=pods)
    listeners = config["static_resources"]["listeners"]
    direct = copy.deepcopy(named(listeners, "gateway"))
    direct["name"] = DIRECT_LISTENER
    direct["address"] = {"socket_address": {"address": addresses.direct.host, "port_value": addresses.direct.port}}
    manager = direct["filter_chains"][0]["filters"][0]["typed_config"]
    manager["stat_prefix"] = DIRECT_LISTENER
    manager["http_filters"] = [part for part in manager["http_filters"] if "ext_proc" not in part["name"]]
    listeners.append(direct)
    return config


def envoy_process(
    *, addresses: EnvoyAddresses, picker: SocketAddress, pods: Sequence[SocketAddress], directory: Path
) -> ProcessSpec:
    """The process, started like the one of `kvmesh up`."""
    config = directory / "bench-envoy.json"
    config.write_text(
        json.dumps(two_route_config(read_template("local.yaml"), addresses=addresses, picker=picker, pods=pods))
    )
    return ProcessSpec(
        name="envoy",
        argv=(
            *(str(find_envoy()), "-c", str(config), "--log-level", "warning"),
            *("--disable-hot-restart", "--concurrency", "2"),
        ),
        ready=(HttpReady(url=f"http://{addresses.admin}/ready"),),
    )

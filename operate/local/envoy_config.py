"""Turns one of the files in `envoy/` into the configuration of this run: addresses, ports and the list of pods.

The rest of the file is unchanged, so that the documented configuration is the one that runs.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operate.local.errors import BrokenTemplateError, MissingProgramError

GATEWAY_LISTENER = "gateway"
PICKER_CLUSTER = "picker"
PODS_CLUSTER = "pods"


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketAddress:
    """An IP address and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "SocketAddress":
        """Read `ip:port` or `[ip6]:port`."""
        host, _, port = text.rpartition(":")
        return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_template(name: str) -> dict[str, Any]:
    """Parse `envoy/{name}` from the installed package, or else from the checkout."""
    import yaml  # noqa: PLC0415 - the picker's command imports SocketAddress from here and needs no YAML

    here = Path(__file__).resolve().parent
    candidates = (here / "envoy" / name, here.parents[1] / "envoy" / name)
    for path in candidates:
        if path.is_file():
            parsed: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
            return parsed
    raise MissingProgramError(f"envoy/{name} is missing from this installation; install kvmesh again")


def fill_in(
    template: dict[str, Any],
    *,
    gateway: SocketAddress,
    admin: SocketAddress,
    picker: SocketAddress,
    pods: Sequence[SocketAddress],
) -> dict[str, Any]:
    """Return a copy of `template` with this run's addresses. Raise BrokenTemplateError if it lacks a part."""
    config = copy.deepcopy(template)
    config["admin"]["address"] = _address(admin)
    resources = config["static_resources"]
    named(resources["listeners"], GATEWAY_LISTENER)["address"] = _address(gateway)
    _set_endpoints(named(resources["clusters"], PICKER_CLUSTER), [picker])
    _set_endpoints(named(resources["clusters"], PODS_CLUSTER), pods)
    return config


def named(parts: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the listener or cluster named `name`. Raise BrokenTemplateError."""
    for part in parts:
        if part["name"] == name:
            return part
    raise BrokenTemplateError(f"the Envoy file has no part named {name!r}")


def _set_endpoints(cluster: dict[str, Any], addresses: Sequence[SocketAddress]) -> None:
    if "load_assignment" not in cluster:
        raise BrokenTemplateError(f"the Envoy cluster {cluster['name']!r} has no list of endpoints to fill in")
    endpoints = [{"endpoint": {"address": _address(address)}} for address in addresses]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]


def _address(address: SocketAddress) -> dict[str, Any]:
    return {"socket_address": {"address": address.host, "port_value": address.port}}

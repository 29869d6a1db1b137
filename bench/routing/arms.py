"""The arms: each way of spreading the load that is compared, by name, and what must run for it.

`stack` starts what an arm says. PLAIN arms are Envoy's own load balancing, PICKER arms Envoy with `kvmesh extproc`,
PEER arms other routers in Envoy's place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bench.routing.peers import LLM_D_GUIDE, SMG, VLLM_ROUTER, Peer

_ENVOY_TYPES = "type.googleapis.com/envoy.extensions.load_balancing_policies"


class Kind(Enum):
    """What stands between clients and pods."""

    PLAIN = "plain"
    PICKER = "picker"
    PEER = "peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One line of the table."""

    name: str
    kind: Kind
    says: str
    balancing: Mapping[str, Any] | None = None  # PLAIN: Envoy's load balancing policy
    picker_flags: tuple[str, ...] = ()  # PICKER: flags of `kvmesh extproc`
    policy: Mapping[str, Any] | None = None  # PICKER: `spec` of the InferencePolicy for --policy
    peer: Peer | None = None


def _plain(name: str, says: str, policy: str, kind: str) -> Arm:
    typed = {"name": f"envoy.load_balancing_policies.{policy}", "typed_config": {"@type": f"{_ENVOY_TYPES}.{kind}"}}
    return Arm(name=name, kind=Kind.PLAIN, says=says, balancing={"policies": [{"typed_extension_config": typed}]})


def picker_arm(name: str, *flags: str, says: str = "", policy: Mapping[str, Any] | None = None) -> Arm:
    """An arm with `kvmesh extproc` and these flags."""
    return Arm(name=name, kind=Kind.PICKER, says=says or " ".join(flags), picker_flags=flags, policy=policy)


def _peer(peer: Peer) -> Arm:
    return Arm(name=peer.name, kind=Kind.PEER, says=peer.says, peer=peer)


STRATEGIES = ("round-robin", "least-request", "prefix-aware", "kv-aware", "latency-cost")
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        _plain("round-robin", "Envoy, ROUND_ROBIN", "round_robin", "round_robin.v3.RoundRobin"),
        _plain("least-request", "Envoy, LEAST_REQUEST", "least_request", "least_request.v3.LeastRequest"),
        picker_arm("kvmesh", says="kvmesh as it comes"),
        *(
            picker_arm(f"kvmesh:{strategy}", policy={"scoring": {"strategy": strategy}}, says=f"strategy {strategy}")
            for strategy in STRATEGIES
        ),
        _peer(LLM_D_GUIDE),
        _peer(VLLM_ROUTER),
        _peer(SMG),
    )
}
STANDARD = (
    *("round-robin", "least-request", "kvmesh", "kvmesh:prefix-aware", "kvmesh:latency-cost"),
    *("llm-d-guide", "vllm-router", "smg"),
)

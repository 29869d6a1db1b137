"""Which processes make up the mesh on one machine, with which flags, and in which order: a plan, nothing is started."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from extproc.local.envoy_config import SocketAddress
from extproc.local.ports import PortUse
from extproc.local.processes import ProcessSpec
from extproc.local.readiness import GrpcReady, HttpReady, RedisReady
from extproc.local.stack_settings import HOST, StackSettings, redis_environment
from kvmesh.redis.address import RedisAccess

KVMESH = (sys.executable, "-m", "extproc")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParts:
    """What was found or made on this machine for one run."""

    run_directory: Path
    envoy_program: Path
    envoy_config: Path
    redis_program: Path | None  # None: --redis names another one
    redis: RedisAccess
    redis_port: int


def fixed_ports(settings: StackSettings) -> tuple[PortUse, ...]:
    """The ports that the children will listen on, in the order in which a user would look at them."""
    uses = [
        PortUse(port=settings.envoy_port, purpose="the gateway (Envoy)", flag="--envoy-port"),
        PortUse(port=settings.envoy_admin_port, purpose="Envoy's admin page", flag="--envoy-admin-port"),
        PortUse(port=settings.grpc_port, purpose="the picker's gRPC", flag="--grpc-port"),
        PortUse(port=settings.admin_port, purpose="the picker's admin page", flag="--admin-port"),
        PortUse(port=settings.indexer_admin_port, purpose="the indexer's admin page", flag="--indexer-admin-port"),
    ]
    if not settings.endpoints:
        uses += [
            PortUse(port=pod.port, purpose=f"simulated pod {number}", flag="--sim-port")
            for number, pod in enumerate(settings.pods)
        ]
    return tuple(uses)


def plan(settings: StackSettings, parts: LocalParts) -> tuple[tuple[ProcessSpec, ...], ...]:
    """The stages: first what others need to be there, then what uses it."""
    redis = (_redis(parts),) if parts.redis_program is not None else ()
    pods = () if settings.endpoints else tuple(_pod(settings, number) for number in range(settings.simulated_pods))
    return ((*redis, *pods), (_indexer(settings, parts), _picker(settings, parts), _envoy(settings, parts)))


def _redis(parts: LocalParts) -> ProcessSpec:
    return ProcessSpec(
        name="redis",
        # nothing is saved: the index is made again from the pods' events
        argv=(
            *(str(parts.redis_program), "--bind", HOST, "--port", str(parts.redis_port)),
            *("--save", "", "--appendonly", "no", "--dir", str(parts.run_directory), "--daemonize", "no"),
        ),
        ready=(RedisReady(access=parts.redis),),
    )


def _pod(settings: StackSettings, number: int) -> ProcessSpec:
    # one process each, so that one pod can be killed and the others live on
    address = settings.pods[number]
    return ProcessSpec(
        name=f"pod-{number}",
        argv=(
            *(*KVMESH, "sim", "--host", address.host, "--sim-port", str(address.port), "--pods", "1"),
            *_model_flags(settings),
            *settings.log_flags,
        ),
        ready=(HttpReady(url=f"http://{address}/health"),),
    )


def _indexer(settings: StackSettings, parts: LocalParts) -> ProcessSpec:
    return ProcessSpec(
        name="indexer",
        argv=(
            *(*KVMESH, "indexer", "--host", HOST, "--indexer-admin-port", str(settings.indexer_admin_port)),
            *("--endpoints", _comma_list(settings.pods)),
            *(("--model", settings.model) if settings.model else ()),
            *(("--event-sources", settings.event_sources) if settings.event_sources is not None else ()),
            *_access_flags(settings),
            *settings.log_flags,
        ),
        environment=redis_environment(parts.redis),
        ready=(HttpReady(url=f"http://{settings.indexer_admin}/readyz"),),
    )


def _picker(settings: StackSettings, parts: LocalParts) -> ProcessSpec:
    return ProcessSpec(
        name="extproc",
        argv=(
            *(*KVMESH, "extproc", "--host", HOST, "--grpc-port", str(settings.grpc_port)),
            *("--admin-port", str(settings.admin_port)),
            *("--endpoints", _comma_list(settings.pods)),
            *_model_flags(settings),
            *_access_flags(settings),
            *("--drain-seconds", "0"),  # Envoy ends at the same moment: no client is left
            *settings.log_flags,
        ),
        environment=redis_environment(parts.redis),
        ready=(HttpReady(url=f"http://{settings.picker_admin}/readyz"), GrpcReady(address=str(settings.picker))),
    )


def _envoy(settings: StackSettings, parts: LocalParts) -> ProcessSpec:
    return ProcessSpec(
        name="envoy",
        argv=(
            *(str(parts.envoy_program), "-c", str(parts.envoy_config), "--log-level", "warning"),
            # shared memory for hot restarts would collide with any other Envoy on this machine
            *("--disable-hot-restart", "--concurrency", "2"),
        ),
        ready=(HttpReady(url=f"http://{settings.envoy_admin}/ready"),),
    )


def _model_flags(settings: StackSettings) -> tuple[str, ...]:
    model = ("--model", settings.model) if settings.model else ()
    tokenizer = ("--tokenizer", str(settings.tokenizer_folder)) if settings.tokenizer_folder else ()
    return (*model, *tokenizer)


def _access_flags(settings: StackSettings) -> tuple[str, ...]:
    return ("--admin-token-file", str(settings.admin_token_file)) if settings.admin_token_file else ()


def _comma_list(addresses: Sequence[SocketAddress]) -> str:
    return ",".join(str(address) for address in addresses)

"""The indexer's settings, checked once at start-up."""

import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kv_indexer.follow.catch_up import RecoveryPolicy
from kv_indexer.watch.stream_activity import FindingPolicy
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.blocks.source import EventAddresses, reachable
from kvmesh.documents.documents import DocumentSource
from kvmesh.errors import SettingError
from kvmesh.redis.address import RedisAccess


def unique_indexer_id(name: str = "") -> str:
    """Return a name that no other process has, nor this one after a restart: leases are given to it.

    `name` is only its readable part, by default HOST:PID. Raise SettingError.
    """
    if name and not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,64}", name):
        raise SettingError(f"indexer id {name!r} is not 1 to 64 letters, digits and . : _ - [ ]")
    return f"{name or f'{socket.gethostname()}:{os.getpid()}'}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSettings:
    """All settings of `kvmesh indexer`."""

    host: str
    admin_port: int
    redis_url: RedisAccess | str  # a plain address has no files beside it
    endpoints: tuple[str, ...]
    model: str
    hash_seed: str
    event_sources: Mapping[str, tuple[EventAddresses, ...]] = field(default_factory=dict)  # endpoint -> by rank
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    rediscover_seconds: float = 10.0  # a pod that is well is asked this often where it publishes
    rediscover_lost_seconds: float = 0.5
    indexer_id: str = field(default_factory=unique_indexer_id)  # differs between any two processes
    findings: FindingPolicy = field(default_factory=FindingPolicy)  # when a pod's behaviour counts as wrong
    scrape_seconds: float = 5.0  # between two looks at a pod's /metrics
    lease_seconds: float = 2.0  # a stream whose indexer is silent for so long passes to another
    admin_access: AdminAccess = field(default_factory=AdminAccess)  # who may see the admin pages
    documents: DocumentSource | None = None  # where pools come from; then there are no endpoints and no model here


def parse_endpoints(value: str | list[str]) -> tuple[str, ...]:
    """Read `HOST:PORT,HOST:PORT` or a list of them; IPv6 hosts are bracketed. Raise SettingError."""
    entries = value.split(",") if isinstance(value, str) else [str(entry) for entry in value]
    endpoints = tuple(entry.strip() for entry in entries if entry.strip())
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not host or not port.isdigit() or not 0 < int(port) < 65536 or (":" in host and not bracketed):
            raise SettingError(f"endpoint {endpoint!r} is not HOST:PORT (IPv6 as [::1]:8000)")
    if len(set(endpoints)) != len(endpoints):
        raise SettingError(f"an endpoint is listed twice in {value!r}")
    return endpoints


def parse_event_sources(value: str | Mapping[str, Any] | None) -> dict[str, tuple[EventAddresses, ...]]:
    """Read `{"HOST:PORT": {"events": "tcp://…", "replay": "tcp://…"}}`; a list has one entry a data-parallel rank.

    `replay` may be missing; an empty value means none. Raise SettingError naming the endpoint.
    """
    try:
        # an empty YAML mapping or value arrives as an empty text
        sources = json.loads(value.strip() or "{}") if isinstance(value, str) else value
    except ValueError as error:
        raise SettingError(f"event sources are not JSON: {error}") from None
    if sources is None:
        return {}
    if not isinstance(sources, Mapping):
        raise SettingError('event sources must be a mapping like {"10.0.0.1:8000": {"events": "tcp://10.0.0.1:5557"}}')
    parsed = {}
    for endpoint, entry in sources.items():
        parse_endpoints([endpoint])
        ranks = entry if isinstance(entry, list) else [entry]
        parsed[endpoint] = tuple(_addresses(endpoint, rank) for rank in ranks)
    return parsed


def _addresses(endpoint: str, entry: Any) -> EventAddresses:
    if not isinstance(entry, Mapping) or not set(entry) <= {"events", "replay"} or "events" not in entry:
        raise SettingError(
            f'event source of {endpoint}: expected {{"events": ADDRESS, "replay": ADDRESS}}, not {entry!r}'
        )
    for address in entry.values():
        if address is not None and not (isinstance(address, str) and address.startswith(("tcp://", "ipc://"))):
            raise SettingError(f"event source of {endpoint}: {address!r} is no tcp:// or ipc:// address")
    return reachable(entry["events"], entry.get("replay"), host=endpoint.rpartition(":")[0])

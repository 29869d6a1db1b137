"""The indexer's settings, checked once at start-up."""

import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_indexer.follow.catch_up import RecoveryPolicy
from kv_indexer.pools.event_sources import ANY_PORT
from kv_indexer.watch.stream_activity import FindingPolicy
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.blocks.source import EventAddresses, reachable
from kvmesh.documents.documents import DocumentSource
from kvmesh.errors import SettingError
from kvmesh.pods.pod_access import PodAccess
from kvmesh.redis.address import RedisAccess
from kvmesh.settings import group, setting, text_setting


def unique_indexer_id(name: str = "") -> str:
    """Return a name that no other process has, nor this one after a restart: leases are given to it.

    `name` is only its readable part, by default HOST:PID. Raise SettingError.
    """
    if name and not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,64}", name):
        raise SettingError(f"indexer id {name!r} is not 1 to 64 letters, digits and . : _ - [ ]")
    return f"{name or f'{socket.gethostname()}:{os.getpid()}'}-{secrets.token_hex(4)}"


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


def parse_ports(value: str) -> range:
    """Read `LOW-HIGH`, or one port. Raise SettingError."""
    low, _, high = value.partition("-")
    ends = [end.strip() for end in (low, high or low)]
    if all(end.isascii() and end.isdigit() and len(end) <= 5 for end in ends):
        first, last = map(int, ends)
        if 0 < first <= last < 65536:
            return range(first, last + 1)
    raise SettingError(f"event ports {value!r} are not LOW-HIGH, such as 5557-5700")


def _addresses(endpoint: str, entry: Any) -> EventAddresses:
    if not isinstance(entry, Mapping) or not set(entry) <= {"events", "replay"} or "events" not in entry:
        raise SettingError(
            f'event source of {endpoint}: expected {{"events": ADDRESS, "replay": ADDRESS}}, not {entry!r}'
        )
    for address in entry.values():
        if address is not None and not (isinstance(address, str) and address.startswith(("tcp://", "ipc://"))):
            raise SettingError(f"event source of {endpoint}: {address!r} is no tcp:// or ipc:// address")
    return reachable(entry["events"], entry.get("replay"), host=endpoint.rpartition(":")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSettings:
    """The settings of `kvmesh indexer`."""

    model: str = setting(
        "",
        "Model name as clients write it; part of every block key. Required, unless pools are followed: these "
        "have theirs from the annotation kvmesh.io/model or from their pods.",
        given=str | None,
        shown=None,
    )
    endpoints: tuple[str, ...] = text_setting(
        (),
        "vLLM pods to follow, by their API address. Required, unless --kubernetes or --policies finds them.",
        read=parse_endpoints,
        metavar="HOST:PORT,…",
    )
    kubernetes: bool = setting(
        False,
        "Follow the pods of all InferencePools, and of Services labelled kvmesh.io/pool=true.",
        switch="--kubernetes",
    )
    policies_folder: Path | None = setting(
        None,
        "Follow the pods of the pools in this folder of YAML or JSON documents (InferencePool, Service, Pod), "
        "watched for changes, instead of asking Kubernetes.",
        "policies",
        metavar="FOLDER",
    )
    namespaces: str = setting("", "With --kubernetes: these namespaces alone. Default: all.", metavar="A,B,…")
    host: str = setting("127.0.0.1", "Address that the admin pages listen on.")
    admin_port: int = setting(
        9091,
        "Port of /healthz, /readyz, /metrics and /sources; 0 takes a free one.",
        "indexer_admin_port",
        least=0,
        most=65535,
    )
    hash_seed: str = setting("kvmesh", "Part of every block key; the picker must have the same.")
    event_sources: Mapping[str, tuple[EventAddresses, ...]] = setting(  # endpoint -> by rank
        {},
        'Where pods publish that have no GET /kv_event_sources (vLLM < 0.31): {"HOST:PORT": {"events": '
        '"tcp://…", "replay": "tcp://…"}}.',
        factory=dict,
        given=str,
        shown="{}",
        read=parse_event_sources,
        metavar="JSON",
    )
    event_ports: range = setting(
        ANY_PORT,
        "Ports at which pods may announce that they publish; always on the host that they are reached at. What "
        "--event-sources names is not limited.",
        given=str,
        shown="1024-65535",
        read=parse_ports,
        metavar="LOW-HIGH",
    )
    indexer_id: str = setting(  # differs between any two processes
        "",
        "Name under which this indexer owns streams, in logs and on /sources; a random part is added, so that no "
        "two processes are taken for one. Default: HOST:PID.",
        factory=unique_indexer_id,
        given=str,
        shown="",
        read=unique_indexer_id,
        metavar="NAME",
    )
    lease_seconds: float = setting(
        2.0,
        "Seconds that a stream stays an indexer's without being renewed. After 0.3 times as long in silence another "
        "indexer takes over what it follows.",
        least=1.0,
        most=60.0,
    )
    unconfirmed_seconds: float = setting(
        30.0,
        "Seconds without an event after which the blocks of a pod do not count until its next one, if it has no replay "
        "endpoint or that does not answer: its last events may be lost.",
        least=1.0,
        most=86_400.0,
    )
    pod_access: PodAccess = group(PodAccess())
    admin_access: AdminAccess = group(AdminAccess())
    redis_url: RedisAccess | str = group(RedisAccess())  # a plain address has no files beside it
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    rediscover_seconds: float = 10.0  # a pod that is well is asked this often where it publishes
    rediscover_lost_seconds: float = 0.5
    findings: FindingPolicy = field(default_factory=FindingPolicy)  # when a pod's behaviour counts as wrong
    scrape_seconds: float = 5.0  # between two looks at a pod's /metrics
    documents: DocumentSource | None = None  # where pools come from; then there are no endpoints and no model here

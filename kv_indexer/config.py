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
from kvmesh.settings import declared, group, setting, text_setting


def unique_indexer_id(name: str = "") -> str:
    """Return a name that is unique to this run of this process, because leases are held under it.

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
    """Read `{"HOST:PORT": {"events": "tcp://…", "replay": "tcp://…"}}`; a list has one entry per data-parallel rank.

    `replay` may be missing; an empty value means no sources. Raise SettingError naming the endpoint.
    """
    try:
        # an empty YAML mapping or value arrives as an empty string
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
        "Model name as clients write it; part of every block key. Required with --endpoints; pools have "
        "theirs from kvmesh.io/model or their pods.",
        given=str | None,
        shown=None,
    )
    endpoints: tuple[str, ...] = text_setting(
        (),
        "API addresses of the vLLM pods. Required without --kubernetes or --policies.",
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
        "Follow the pods of the pools in this folder of YAML or JSON documents (InferencePool, Service, Pod).",
        "policies",
        metavar="FOLDER",
    )
    namespaces: str = setting("", "Namespaces to follow with --kubernetes. Default: all.", metavar="A,B,…")
    host: str = setting("127.0.0.1", "Listen address of the admin pages.")
    admin_port: int = setting(
        9091,
        "Port of /healthz, /readyz, /metrics and /sources; 0 takes a free one.",
        "indexer_admin_port",
        least=0,
        most=65535,
    )
    hash_seed: str = setting("kvmesh", "Seed of the block keys; equal for indexer and picker.")
    event_sources: Mapping[str, tuple[EventAddresses, ...]] = setting(  # endpoint -> addresses by rank
        {},
        'Event addresses of pods without GET /kv_event_sources (vLLM < 0.31): {"HOST:PORT": {"events": '
        '"tcp://…", "replay": "tcp://…"}}.',
        factory=dict,
        given=str,
        shown="{}",
        read=parse_event_sources,
        metavar="JSON",
    )
    event_ports: range = setting(
        ANY_PORT,
        "Allowed ports of announced event addresses, always on the pod's host; no limit for --event-sources.",
        given=str,
        shown="1024-65535",
        read=parse_ports,
        metavar="LOW-HIGH",
    )
    indexer_id: str = setting(  # a new one for each process
        "",
        "Name of this indexer in leases, logs and /sources; a random part is added. Default: HOST:PID.",
        factory=unique_indexer_id,
        given=str,
        shown="",
        read=unique_indexer_id,
        metavar="NAME",
    )
    lease_seconds: float = setting(
        2.0,
        "Lease of a stream in seconds; another indexer takes over after 0.3 times as long without a sign of life.",
        least=1.0,
        most=60.0,
    )
    unconfirmed_seconds: float = setting(
        30.0,
        "Seconds without an event after which a pod's blocks stop counting until its next event, if the pod "
        "answers no replay.",
        least=1.0,
        most=86_400.0,
    )
    pod_access: PodAccess = group(PodAccess())
    admin_access: AdminAccess = group(AdminAccess())
    redis_url: str = declared(RedisAccess, "url")
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    rediscover_seconds: float = 10.0  # how often a healthy pod is asked where it publishes
    rediscover_lost_seconds: float = 0.5
    findings: FindingPolicy = field(default_factory=FindingPolicy)  # when a pod's behaviour counts as wrong
    scrape_seconds: float = 5.0  # between two looks at a pod's /metrics
    documents: DocumentSource | None = None  # where pools come from; if set, `endpoints` and `model` are empty

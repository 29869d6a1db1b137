"""Reads --endpoints. Names become IP addresses: the picker's pick must be the text that Envoy has in its cluster."""

import json
import socket
from collections.abc import Mapping

from extproc.local.envoy_config import SocketAddress
from extproc.local.errors import BadEndpointError, BadSettingError


def resolve(endpoints: str) -> dict[str, SocketAddress]:
    """Each entry of `HOST:PORT,…` as written and its address, in that order, IPv4 first where a name has both.

    Raise BadEndpointError.
    """
    entries = [entry.strip() for entry in endpoints.split(",") if entry.strip()]
    addresses = {entry: _resolve_one(entry) for entry in entries}
    if len(set(addresses.values())) != len(entries):
        raise BadEndpointError(f"two of --endpoints {endpoints} are the same address")
    return addresses


def resolve_event_sources(text: str, *, endpoints: Mapping[str, SocketAddress]) -> str:
    """--event-sources with addresses for keys, so that they still match the pods after `resolve`; JSON in and out.

    A key that names no pod stays as it is: a configuration may know more pods than this run uses. Raise
    BadSettingError for what is no JSON mapping, and for two keys of one pod.
    """
    try:
        sources = json.loads(text or "{}")
    except ValueError as error:
        raise BadSettingError(f"--event-sources is not JSON: {error}") from None
    if not isinstance(sources, Mapping):
        raise BadSettingError(f"--event-sources must map HOST:PORT to addresses, not be {text}")
    resolved = {_pod_key(key, endpoints=endpoints): entry for key, entry in sources.items()}
    if len(resolved) != len(sources):
        raise BadSettingError(f"two keys of --event-sources are the same pod: {', '.join(sources)}")
    return json.dumps(resolved)


def _pod_key(written: str, *, endpoints: Mapping[str, SocketAddress]) -> str:
    if written in endpoints:  # not asked again: a name with several addresses may give another one
        return str(endpoints[written])
    if not endpoints:
        return written
    try:
        address = _resolve_one(written)
    except BadEndpointError:
        return written
    return str(address) if address in endpoints.values() else written


def _resolve_one(entry: str) -> SocketAddress:
    host, _, port = entry.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host and not bracketed):
        raise BadEndpointError(f"endpoint {entry!r} is not HOST:PORT (IPv6 as [::1]:8000)")
    written = SocketAddress.parse(entry)
    try:
        found = socket.getaddrinfo(written.host, written.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS could hold
        raise BadEndpointError(f"endpoint {entry}: {getattr(error, 'strerror', None) or error}") from error
    first = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return SocketAddress(host=str(first[4][0]), port=written.port)

"""Reads --endpoints. Names become IP addresses: the picker's pick must be the text that Envoy has in its cluster."""

import socket

from extproc.config import parse_endpoints
from extproc.errors import ConfigError
from extproc.local.envoy_config import SocketAddress
from extproc.local.errors import BadEndpointError


def resolve(endpoints: str) -> tuple[SocketAddress, ...]:
    """The addresses of `HOST:PORT,…` in that order, IPv4 first where a name has both; raise BadEndpointError."""
    try:
        entries = parse_endpoints(endpoints)
    except ConfigError as error:
        raise BadEndpointError(str(error)) from error
    addresses = tuple(_resolve_one(entry) for entry in entries)
    if len(set(addresses)) != len(addresses):
        raise BadEndpointError(f"two of --endpoints {endpoints} are the same address")
    return addresses


def _resolve_one(entry: str) -> SocketAddress:
    written = SocketAddress.parse(entry)
    try:
        found = socket.getaddrinfo(written.host, written.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadEndpointError(f"endpoint {entry}: {error.strerror}") from error
    first = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return SocketAddress(host=str(first[4][0]), port=written.port)

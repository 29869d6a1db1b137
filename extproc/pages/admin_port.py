"""The port of the admin pages, opened first at start-up.

So an unusable address or certificate aborts the start before any request arrives. Early connections wait until the
pages are served. Must not import the admin server: that takes longer than the rest of the start.
"""

import socket
from collections.abc import Sequence

from extproc.errors import ConfigError
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.admin.admin_credentials import admin_tls
from kvmesh.errors import SettingError

BACKLOG = 128


def open_admin_port(*, host: str, port: int, access: AdminAccess) -> Sequence[socket.socket]:
    """Listen on each address of the host. Raise ConfigError naming the port or the certificate."""
    try:
        if access.tls is not None:
            admin_tls(access)
    except SettingError as error:
        raise ConfigError(str(error)) from error
    return listen(host=host, port=port)


def listen(*, host: str, port: int) -> Sequence[socket.socket]:
    """Return a listening socket for each address of the host. Raise ConfigError naming the port."""
    opened: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            listening = socket.socket(family, socket.SOCK_STREAM)
            opened.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, True)
            listening.bind(address)
            listening.listen(BACKLOG)
            listening.setblocking(False)
    except OSError as error:
        for each in opened:
            each.close()
        raise ConfigError(f"cannot listen on {host}:{port} (--admin-port): {error.strerror}") from error
    return opened

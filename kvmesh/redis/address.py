"""The address of Redis as a user gives it, checked. Pure: `redis.route` reads the files that it names.

Nothing that may be a password is ever part of a message, a label or a repr.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from kvmesh.errors import RedisUrlError
from kvmesh.settings import setting

SECURE = "rediss"  # each scheme except unix:// also exists with TLS
PATHS = ("password_file", "sentinel_password_file", "ca_file", "cert_file", "key_file")
PARAMETERS = ("db", "username", "password", *PATHS, "server_name")
KNOWN_SCHEMES = "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (rediss+… with TLS)"


class RedisKind(Enum):
    """How the server with the index is found."""

    STANDALONE = "standalone"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class _Scheme:
    kind: RedisKind
    default_port: int
    example: str


_SCHEMES = {
    "redis": _Scheme(RedisKind.STANDALONE, 6379, "redis://:PASSWORD@10.0.0.5:6379/0"),
    "unix": _Scheme(RedisKind.STANDALONE, 0, "unix:///run/redis.sock?db=0"),
    "redis+sentinel": _Scheme(RedisKind.SENTINEL, 26379, "redis+sentinel://10.0.0.5:26379,10.0.0.6:26379/mymaster/0"),
    "redis+cluster": _Scheme(RedisKind.CLUSTER, 6379, "redis+cluster://10.0.0.5:6379,10.0.0.6:6379"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisNode:
    """The address of one server or Sentinel."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def password_warning(url: str) -> str | None:
    """Return why an address with a password must not be given on a command line; None if it has none."""
    try:
        has_password = bool(read_address(url).password)
    except RedisUrlError:
        return None  # the attempt to connect reports the fault
    return (
        "the password in --redis can be read by every user of this machine, in the list of processes: use the "
        "parameter password_file, or give the address in KVMESH_REDIS"
        if has_password
        else None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAccess:
    """The option --redis. The files that the address names are read again for every connection."""

    url: str = setting(
        "redis://127.0.0.1:6379/0",
        "Redis or Valkey of the index: redis://HOST:PORT/DB, rediss:// (TLS), unix:///SOCKET, "
        "redis+sentinel://HOST:PORT,…/MASTER/DB or redis+cluster://HOST:PORT,… (rediss+… with TLS). Files of the "
        "password and of TLS are parameters: ?password_file=/… (docs/guides/redis-connection.md).",
        "redis",
        secret=True,
        warn=password_warning,
        metavar="URL",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A checked address."""

    kind: RedisKind
    label: str  # the address without user, password and query; safe to show
    nodes: tuple[RedisNode, ...]  # the server, the Sentinels, or some nodes of the cluster; empty for a socket file
    socket_path: str = ""
    secure: bool = False
    database: int = 0
    master_name: str = ""  # the Sentinels' name for it
    username: str = ""
    password: str = field(default="", repr=False)  # the one in the URL; a file's is not kept
    server_name: str = ""  # that the certificate must have; default: the host that is connected to
    files: Mapping[str, Path] = field(default_factory=dict)  # by parameter (PATHS)

    @property
    def shown(self) -> str:
        """The address with its parameters, without a password and its user."""
        shown = {"username": "" if self.password else self.username, "server_name": self.server_name, **self.files}
        if self.database and not self.label.endswith(f"/{self.database}"):
            shown["db"] = self.database
        query = urlencode({name: str(value) for name, value in shown.items() if value}, safe="/")
        return f"{self.label}?{query}" if query else self.label


def read_address(url: str) -> RedisAddress:
    """Check an address. Raise RedisUrlError, whose message holds no password."""
    try:
        parts = urlsplit(url)
        scheme = _scheme(parts.scheme)
        fault = f"it must begin with {KNOWN_SCHEMES}" if scheme is None else _fault(parts, scheme)
    except ValueError:
        # the library's own message may repeat the password
        raise _refused(url, "it cannot be read", _SCHEMES["redis"].example) from None
    if scheme is None or fault:
        raise _refused(url, fault, (scheme or _SCHEMES["redis"]).example)
    address = _address(parts, scheme)
    if fault := _contradiction(address):
        raise RedisUrlError(f"Redis at {address.label}: {fault}")
    return address


def _scheme(name: str) -> _Scheme | None:
    scheme = _SCHEMES.get(name.replace(SECURE, "redis", 1))
    if scheme is None or not name.startswith(SECURE):
        return scheme
    return replace(scheme, example=scheme.example.replace("redis", SECURE, 1))


def without_secrets(url: str) -> str:
    """Blank out everything that may be a password, even in a malformed address."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    if "@" in rest:
        rest = "***" if "?" in rest else f"***@{rest.rpartition('@')[2]}"
    else:
        rest, question, _ = rest.partition("?")
        hosts = rest.partition("/")[0]
        if any(_port_is_bad(host) for host in hosts.split(",")):
            # perhaps USER:PASSWORD without its @HOST
            rest = "***" if "," in hosts else f"{rest.rpartition(':')[0]}:***"
        rest += "?***" if question else ""
    return scheme + separator + rest


def _refused(url: str, fault: str, example: str) -> RedisUrlError:
    return RedisUrlError(f"Redis address {without_secrets(url)!r}: {fault}; a valid one is e.g. {example}")


def _fault(parts: SplitResult, scheme: _Scheme) -> str:
    is_unix, hosts, segments = parts.scheme == "unix", _hosts(parts), [] if parts.scheme == "unix" else _segments(parts)
    sentinel, several = scheme.kind is RedisKind.SENTINEL, scheme.kind is not RedisKind.STANDALONE
    database = _setting(parts, "db") or "".join(segments[1:2] if sentinel else segments[:1])
    no_host = "it names no host" if len(hosts) == 1 else "one of its hosts is empty"
    unknown = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - set(PARAMETERS)
    checks = (
        (is_unix and (hosts != [""] or not parts.path.strip("/")), "it names no socket file"),
        (not is_unix and not all(map(_host_name, hosts)), no_host),
        ("@" in parts.path or bool(parts.fragment), "in a password, write / as %2F, # as %23 and @ as %40"),
        (any(map(_port_is_bad, hosts)), "its port is not a number from 1 to 65535"),
        (len(hosts) > 1 and not several, "it names several hosts: use redis+sentinel:// or redis+cluster://"),
        (sentinel and not segments, "it does not say what the Sentinels call the master"),
        (len(segments) > 1 + sentinel, "it has too many parts"),
        (bool(database) and not _is_number(database), "its database is not a number"),
        (scheme.kind is RedisKind.CLUSTER and database.strip("0") != "", "a Redis Cluster has database 0 only"),
        (bool(unknown), f"behind '?' it takes {', '.join(PARAMETERS)} only"),
    )
    return next((fault for failed, fault in checks if failed), "")


def _address(parts: SplitResult, scheme: _Scheme) -> RedisAddress:
    is_unix, segments = parts.scheme == "unix", _segments(parts)
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    in_path = "".join(segments[1:2] if scheme.kind is RedisKind.SENTINEL else segments[:1])
    where = parts.path if is_unix else ",".join(_hosts(parts)) + parts.path
    return RedisAddress(
        kind=scheme.kind,
        label=f"{parts.scheme}://{where}",
        nodes=() if is_unix else tuple(_node(host, scheme.default_port) for host in _hosts(parts)),
        socket_path=unquote(parts.path) if is_unix else "",
        secure=parts.scheme.startswith(SECURE),
        database=int(_setting(parts, "db") or ("" if is_unix else in_path) or 0),
        master_name=unquote(segments[0]) if scheme.kind is RedisKind.SENTINEL else "",
        username=unquote(user) or _setting(parts, "username"),
        password=unquote(password) or _setting(parts, "password"),
        server_name=_setting(parts, "server_name"),
        files={name: Path(path) for name in PATHS if (path := _setting(parts, name))},
    )


def _contradiction(address: RedisAddress) -> str:
    files = address.files
    relative = next((name for name, path in files.items() if not path.is_absolute()), None)
    tls = ("ca_file", "cert_file", "key_file")
    checks = (
        (relative, f"{relative} needs an absolute path"),
        (address.password and "password_file" in files, "it has both a password and a password_file"),
        (
            address.username and not (address.password or "password_file" in files),
            f"user {address.username!r} without a password: add the parameter password_file",
        ),
        (
            "sentinel_password_file" in files and address.kind is not RedisKind.SENTINEL,
            "sentinel_password_file is for redis+sentinel://",
        ),
        (
            (address.server_name or not files.keys().isdisjoint(tls)) and not address.secure,
            "ca_file, cert_file, key_file and server_name need TLS: rediss://",
        ),
        ("key_file" in files and "cert_file" not in files, "key_file without cert_file"),
    )
    return next((fault for failed, fault in checks if failed), "")


def _hosts(parts: SplitResult) -> list[str]:
    return parts.netloc.rpartition("@")[2].split(",")


def _segments(parts: SplitResult) -> list[str]:
    return [each for each in parts.path.split("/") if each]


def _setting(parts: SplitResult, name: str) -> str:
    return dict(parse_qsl(parts.query)).get(name, "")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _port_is_bad(host: str) -> bool:
    _, colon, port = host.rpartition("@")[2].rpartition("]")[2].rpartition(":")
    return bool(colon) and not (_is_number(port) and 0 < int(port) < 65536)


def _node(host: str, default_port: int) -> RedisNode:
    port = host.rpartition("]")[2].rpartition(":")[2] if ":" in host.rpartition("]")[2] else ""
    return RedisNode(host=unquote(_host_name(host)), port=int(port or default_port))

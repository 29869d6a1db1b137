"""The address of Redis as a user gives it, checked. Pure: `redis.route` reads the files that it names.

Nothing that may be a password is ever part of a message, a label or a repr.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvmesh.errors import RedisUrlError
from kvmesh.settings import setting

SECURE = "rediss"  # each scheme but unix:// also with TLS
KNOWN_SCHEMES = "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (rediss+… with TLS)"


class RedisKind(Enum):
    """How the server is found that holds the index."""

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
    """Where one server or Sentinel listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def password_warning(url: str) -> str | None:
    """Say why an address with a password must not stand on a command line; None where it has none."""
    try:
        has_password = bool(read_address(url).password)
    except RedisUrlError:
        return None  # connecting says what is wrong with it
    return (
        "the password in --redis can be read by every user of this machine, in the list of processes: give it in "
        "--redis-password-file, or the address in KVMESH_REDIS"
        if has_password
        else None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAccess:
    """How to reach Redis, as given. The files are read again at every connection."""

    url: str = setting(
        "redis://127.0.0.1:6379/0",
        "Redis or Valkey that holds the index: redis://HOST:PORT/DB, rediss:// (TLS), unix:///SOCKET, "
        "redis+sentinel://HOST:PORT,…/MASTER/DB or redis+cluster://HOST:PORT,… (rediss+… with TLS).",
        "redis",
        secret=True,
        warn=password_warning,
        metavar="URL",
    )
    username: str | None = setting(None, "Redis user (ACL). Default: the one in --redis, or none.", "redis_username")
    password_file: Path | None = setting(
        None, "File with the Redis password; read anew at every connection.", "redis_password_file"
    )
    sentinel_password_file: Path | None = setting(
        None, "File with the Sentinels' own password; read anew at every connection.", "redis_sentinel_password_file"
    )
    ca_file: Path | None = setting(
        None, "PEM file with the authorities that may sign Redis' certificate. Default: the system's.", "redis_ca_file"
    )
    cert_file: Path | None = setting(
        None, "PEM file with the certificate that Redis is shown; read at every connection.", "redis_cert_file"
    )
    key_file: Path | None = setting(
        None, "PEM file with the key of --redis-cert-file. Default: it is in that file.", "redis_key_file"
    )
    server_name: str | None = setting(
        None, "Name that Redis' certificate must have. Default: the host that is connected to.", "redis_server_name"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A checked access."""

    kind: RedisKind
    label: str  # the address without user, password and query; safe to show
    nodes: tuple[RedisNode, ...]  # the server, the Sentinels, or some nodes of the cluster; empty with a socket file
    socket_path: str = ""
    secure: bool = False
    database: int = 0
    master_name: str = ""  # as the Sentinels call it
    username: str = ""
    password: str = field(default="", repr=False)  # the one in the URL; a file's is not kept
    access: RedisAccess = field(repr=False)


def read_address(access: RedisAccess | str) -> RedisAddress:
    """Check an address and what belongs to it. Raise RedisUrlError, whose message holds no password."""
    if isinstance(access, str):
        access = RedisAccess(url=access)
    try:
        parts = urlsplit(access.url)
        scheme = _scheme(parts.scheme)
        fault = f"it must begin with {KNOWN_SCHEMES}" if scheme is None else _fault(parts, scheme)
    except ValueError:
        # the library's own message may repeat the password
        raise _refused(access.url, "it cannot be read", _SCHEMES["redis"].example) from None
    if scheme is None or fault:
        raise _refused(access.url, fault, (scheme or _SCHEMES["redis"]).example)
    address = _address(access, parts, scheme)
    if fault := _contradiction(address):
        raise RedisUrlError(f"Redis at {address.label}: {fault}")
    return address


def _scheme(name: str) -> _Scheme | None:
    scheme = _SCHEMES.get(name.replace(SECURE, "redis", 1))
    if scheme is None or not name.startswith(SECURE):
        return scheme
    return replace(scheme, example=scheme.example.replace("redis", SECURE, 1))


def without_secrets(url: str) -> str:
    """Blank out all that may be a password, also in an address that cannot be read."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    if "@" in rest:
        rest = "***" if "?" in rest else f"***@{rest.rpartition('@')[2]}"
    else:
        rest, question, _ = rest.partition("?")
        hosts = rest.partition("/")[0]
        if any(_port_is_bad(host) for host in hosts.split(",")):
            # perhaps USER:PASSWORD whose @HOST was forgotten
            rest = "***" if "," in hosts else f"{rest.rpartition(':')[0]}:***"
        rest += "?***" if question else ""
    return scheme + separator + rest


def _refused(url: str, fault: str, example: str) -> RedisUrlError:
    return RedisUrlError(f"Redis address {without_secrets(url)!r}: {fault}; a valid one is e.g. {example}")


def _fault(parts: SplitResult, scheme: _Scheme) -> str:
    """Say what is wrong with an address, or ''."""
    is_unix, hosts, segments = parts.scheme == "unix", _hosts(parts), [] if parts.scheme == "unix" else _segments(parts)
    sentinel, several = scheme.kind is RedisKind.SENTINEL, scheme.kind is not RedisKind.STANDALONE
    database = _setting(parts, "db") or "".join(segments[1:2] if sentinel else segments[:1])
    no_host = "it names no host" if len(hosts) == 1 else "one of its hosts is empty"
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
        (not _settings_are_known(parts), "behind '?' it takes db, username and password only"),
    )
    return next((fault for failed, fault in checks if failed), "")


def _address(access: RedisAccess, parts: SplitResult, scheme: _Scheme) -> RedisAddress:
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
        username=access.username or unquote(user) or _setting(parts, "username"),
        password=unquote(password) or _setting(parts, "password"),
        access=access,
    )


def _contradiction(address: RedisAddress) -> str:
    """Say which options do not go together, or ''."""
    access = address.access
    tls = (access.ca_file, access.cert_file, access.key_file, access.server_name)
    checks = (
        (address.password and access.password_file, "the password is in the address and in --redis-password-file"),
        (
            address.username and not (address.password or access.password_file),
            f"user {address.username!r} without a password: give --redis-password-file",
        ),
        (
            access.sentinel_password_file and address.kind is not RedisKind.SENTINEL,
            "--redis-sentinel-password-file is for redis+sentinel://",
        ),
        (
            any(tls) and not address.secure,
            "--redis-ca-file, --redis-cert-file, --redis-key-file and --redis-server-name need TLS: rediss://",
        ),
        (access.key_file and not access.cert_file, "--redis-key-file without --redis-cert-file"),
    )
    return next((fault for failed, fault in checks if failed), "")


def _hosts(parts: SplitResult) -> list[str]:
    return parts.netloc.rpartition("@")[2].split(",")


def _segments(parts: SplitResult) -> list[str]:
    return [each for each in parts.path.split("/") if each]


def _setting(parts: SplitResult, name: str) -> str:
    return dict(parse_qsl(parts.query)).get(name, "")


def _settings_are_known(parts: SplitResult) -> bool:
    names = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    return names <= {"db", "username", "password"}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6


def _host_name(host: str) -> str:
    """The host without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _port_is_bad(host: str) -> bool:
    _, colon, port = host.rpartition("@")[2].rpartition("]")[2].rpartition(":")
    return bool(colon) and not (_is_number(port) and 0 < int(port) < 65536)


def _node(host: str, default_port: int) -> RedisNode:
    port = host.rpartition("]")[2].rpartition(":")[2] if ":" in host.rpartition("]")[2] else ""
    return RedisNode(host=unquote(_host_name(host)), port=int(port or default_port))

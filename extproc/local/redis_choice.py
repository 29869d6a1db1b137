"""Which Redis `kvmesh up` uses: its own, or the user's with all that belongs to it. Keeps passwords out of sight.

The children get it through their environment: every user of the machine can read the flags of a process.
"""

from collections.abc import Mapping
from pathlib import Path

from extproc.local.errors import BadSettingError
from kvmesh.errors import RedisUrlError
from kvmesh.plain_text import printable
from kvmesh.redis.address import RedisAccess, read_address


def foreign_redis(
    url: str | None,
    *,
    username: str | None,
    password_file: Path | None,
    sentinel_password_file: Path | None,
    ca_file: Path | None,
    cert_file: Path | None,
    key_file: Path | None,
    server_name: str | None,
) -> RedisAccess | None:
    """Gather what the flags say; None means a Redis of our own. Raise BadSettingError."""
    access = RedisAccess(
        url=url or "",
        username=username,
        password_file=password_file,
        sentinel_password_file=sentinel_password_file,
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
        server_name=server_name,
    )
    if url is None and len(redis_environment(access)) > 1:
        raise BadSettingError(f"{_flags(access)} without --redis: the Redis that is started here needs none of it")
    return None if url is None else access


def require_redis(access: RedisAccess, *, flag: str) -> None:
    """Raise BadSettingError for what no Redis client could use; nothing is connected, no password is shown."""
    try:
        read_address(access)
    except RedisUrlError as error:
        raise BadSettingError(f"{flag} cannot be used: {printable(str(error))}") from None


def redis_environment(access: RedisAccess) -> Mapping[str, str]:
    """The environment variables that tell a child the same; files by their full path."""
    files = {
        "PASSWORD_FILE": access.password_file,
        "SENTINEL_PASSWORD_FILE": access.sentinel_password_file,
        "CA_FILE": access.ca_file,
        "CERT_FILE": access.cert_file,
        "KEY_FILE": access.key_file,
    }
    names = {"USERNAME": access.username, "SERVER_NAME": access.server_name}
    given = {name: value for name, value in names.items() if value}
    given |= {name: str(path.resolve()) for name, path in files.items() if path is not None}
    return {"KVMESH_REDIS": access.url, **{f"KVMESH_REDIS_{name}": value for name, value in given.items()}}


def redis_label(access: RedisAccess) -> str:
    """The address as it may be shown: without user and password."""
    return read_address(access).label


def _flags(access: RedisAccess) -> str:
    names = [name.removeprefix("KVMESH_") for name in redis_environment(access) if name != "KVMESH_REDIS"]
    return ", ".join(f"--{name.lower().replace('_', '-')}" for name in names)

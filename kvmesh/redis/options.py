"""How to reach Redis, as options that every command of `kvmesh` takes. Imports nothing heavy.

The one module beside `api` that the picker imports: its commands need these options before anything is loaded.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvmesh.redis.address import RedisAccess

log = logging.getLogger(__name__)

RedisUrl = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="Redis or Valkey that holds the index: redis://HOST:PORT/DB, rediss:// (TLS), unix:///SOCKET, "
        "redis+sentinel://HOST:PORT,…/MASTER/DB or redis+cluster://HOST:PORT,… (rediss+… with TLS).",
    ),
]
RedisUsername = Annotated[str | None, typer.Option(help="Redis user (ACL). Default: the one in --redis, or none.")]
RedisPasswordFile = Annotated[
    Path | None, typer.Option(help="File with the Redis password; read anew at every connection.")
]
RedisSentinelPasswordFile = Annotated[
    Path | None, typer.Option(help="File with the Sentinels' own password; read anew at every connection.")
]
RedisCaFile = Annotated[
    Path | None,
    typer.Option(help="PEM file with the authorities that may sign Redis' certificate. Default: the system's."),
]
RedisCertFile = Annotated[
    Path | None, typer.Option(help="PEM file with the certificate that Redis is shown; read at every connection.")
]
RedisKeyFile = Annotated[
    Path | None, typer.Option(help="PEM file with the key of --redis-cert-file. Default: it is in that file.")
]
RedisServerName = Annotated[
    str | None, typer.Option(help="Name that Redis' certificate must have. Default: the host that is connected to.")
]
CONNECTION: dict[str, tuple[Any, Any]] = {  # field of RedisAccess -> its option and default
    "redis": (RedisUrl, "redis://127.0.0.1:6379/0"),
    "redis_username": (RedisUsername, None),
    "redis_password_file": (RedisPasswordFile, None),
    "redis_sentinel_password_file": (RedisSentinelPasswordFile, None),
    "redis_ca_file": (RedisCaFile, None),
    "redis_cert_file": (RedisCertFile, None),
    "redis_key_file": (RedisKeyFile, None),
    "redis_server_name": (RedisServerName, None),
}


def with_redis(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say how to reach Redis, and hand it one RedisAccess for them, as `access`."""

    @wraps(command)
    def run(**values: Any) -> None:
        from kvmesh.redis.address import RedisAccess

        connection = {name: values.pop(name) for name in CONNECTION}
        url = connection.pop("redis")
        fields = {name.removeprefix("redis_"): value for name, value in connection.items()}
        access = RedisAccess(url=url, **fields)
        _warn_of_flag(access)
        command(access, **values)

    kind = inspect.Parameter.KEYWORD_ONLY
    own = [each.replace(kind=kind) for each in inspect.signature(command).parameters.values() if each.name != "access"]
    options = [
        inspect.Parameter(name, kind, annotation=annotation, default=default)
        for name, (annotation, default) in CONNECTION.items()
    ]
    run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*own, *options)}
    return run


def _warn_of_flag(access: "RedisAccess") -> None:
    """Say so where a password was given as a flag: every user of the machine can read the flags of a process."""
    from kvmesh.errors import RedisUrlError
    from kvmesh.redis.address import read_address

    if not any(access.url in argument for argument in sys.argv):
        return
    try:
        has_password = bool(read_address(access).password)
    except RedisUrlError:
        return  # whoever connects says so
    if has_password:
        log.warning(
            "the password in --redis can be read by every user of this machine, in the list of processes: give it in "
            "--redis-password-file, or the address in KVMESH_REDIS"
        )

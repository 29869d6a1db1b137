"""How to reach Redis, as options that every command of this package takes. Imports nothing heavy.

The picker's commands have the same options in a file of their own; a test keeps the two equal.
"""

from pathlib import Path
from typing import Annotated

import typer

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

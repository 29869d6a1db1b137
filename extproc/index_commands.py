"""The command `kvmesh index lookup`, in the group that the indexer's package began. Imports late, to start fast."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from extproc.errors import ConfigError
from extproc.redis_options import (
    RedisCaFile,
    RedisCertFile,
    RedisKeyFile,
    RedisPasswordFile,
    RedisSentinelPasswordFile,
    RedisServerName,
    RedisUrl,
    RedisUsername,
)

app = typer.Typer()
index = typer.Typer()
app.add_typer(index, name="index")


@index.command("lookup")
def lookup(
    prompt: Annotated[
        str,
        typer.Argument(metavar="FILE|-", help="File with a request body, or with a JSON list of token ids; -: stdin."),
    ],
    model: Annotated[str, typer.Option(help="Model name as clients write it; part of every block key.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the model's tokenizer.json; token ids need none.")
    ] = None,
    hash_seed: Annotated[str, typer.Option(help="Seed of the block keys; the same as the indexer's.")] = "kvmesh",
    redis: RedisUrl = "redis://127.0.0.1:6379/0",
    redis_username: RedisUsername = None,
    redis_password_file: RedisPasswordFile = None,
    redis_sentinel_password_file: RedisSentinelPasswordFile = None,
    redis_ca_file: RedisCaFile = None,
    redis_cert_file: RedisCertFile = None,
    redis_key_file: RedisKeyFile = None,
    redis_server_name: RedisServerName = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON with stable field names instead of a table.")
    ] = False,
    timeout_ms: Annotated[float, typer.Option(min=1, help="Milliseconds to wait for the index.")] = 5000,
) -> None:
    """Show who holds the beginning of a prompt, endpoint by endpoint."""
    import msgspec
    from rich.console import Console

    from extproc.index_lookup import look_up, read_token_ids, render
    from kv_indexer.api import RedisAccess

    try:
        content = sys.stdin.buffer.read() if prompt == "-" else Path(prompt).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {prompt}: {error.strerror}") from error
    access = RedisAccess(
        url=redis,
        username=redis_username,
        password_file=redis_password_file,
        sentinel_password_file=redis_sentinel_password_file,
        ca_file=redis_ca_file,
        cert_file=redis_cert_file,
        key_file=redis_key_file,
        server_name=redis_server_name,
    )
    prompts = read_token_ids(content, model=model, tokenizer=tokenizer)
    report = asyncio.run(look_up(access, prompts, model=model, hash_seed=hash_seed, timeout_seconds=timeout_ms / 1000))
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        render(report, console=Console(highlight=False))

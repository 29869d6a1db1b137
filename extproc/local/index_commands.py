"""The command `kvmesh index lookup`, in the group that the indexer's package began. Imports late, to start fast."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.errors import ConfigError, KvmeshError
from kvmesh.redis.options import with_redis

if TYPE_CHECKING:
    from kvmesh.redis.address import RedisAccess

FAILURE, WRONG_USAGE = 1, 2

app = typer.Typer()
index = typer.Typer()
app.add_typer(index, name="index")


@index.command("lookup")
@with_redis
def lookup(
    access: "RedisAccess",
    prompt: Annotated[
        str,
        typer.Argument(metavar="FILE|-", help="File with a request body, or with a JSON list of token ids; -: stdin."),
    ],
    model: Annotated[str, typer.Option(help="Model name as clients write it; part of every block key.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the model's tokenizer.json; token ids need none.")
    ] = None,
    hash_seed: Annotated[str, typer.Option(help="Seed of the block keys; the same as the indexer's.")] = "kvmesh",
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON with stable field names instead of a table.")
    ] = False,
    timeout_ms: Annotated[float, typer.Option(min=1, help="Milliseconds to wait for the index.")] = 5000,
) -> None:
    """Show who holds the beginning of a prompt, endpoint by endpoint."""
    import msgspec
    from rich.console import Console

    from extproc.local.index_lookup import look_up, read_token_ids, render

    try:
        prompts = read_token_ids(_read(prompt), model=model, tokenizer=tokenizer)
        report = asyncio.run(
            look_up(access, prompts, model=model, hash_seed=hash_seed, timeout_seconds=timeout_ms / 1000)
        )
    except KvmeshError as error:
        typer.echo(f"kvmesh index lookup: {error}", err=True)  # as the other commands of the group say it
        raise typer.Exit(WRONG_USAGE if isinstance(error, ConfigError) else FAILURE) from None
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        render(report, console=Console(highlight=False))


def _read(prompt: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if prompt == "-" else Path(prompt).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {prompt}: {error.strerror}") from error

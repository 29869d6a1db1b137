"""The commands `kvmesh index …` that look into Redis. Imports late, to start fast.

`kvmesh index lookup` belongs to the same group and comes from `operate`, which has the tokenizer.
"""

from typing import Annotated

import typer

from kvmesh.options import takes_settings
from kvmesh.output.forms import Output, OutputForm
from kvmesh.redis.address import RedisAccess

app = typer.Typer()
index = typer.Typer()
app.add_typer(index, name="index", help="Show, verify and clear the prefix index in Redis.")


@index.command("sources")
@takes_settings
def sources(
    access: RedisAccess,
    output: Output = OutputForm.TABLE,
) -> None:
    """Show every source: state, epoch, sequence, lag, blocks, events/s, and its indexer."""
    from kv_indexer.inspect import inspect_command

    inspect_command.sources(access.url, output)


@index.command("verify")
@takes_settings
def verify(
    access: RedisAccess,
    output: Output = OutputForm.TABLE,
) -> None:
    """Recount the index from raw keys and list contradictions; safe during operation.

    Exit code 0: no differences; 1: differences; 2: verification failed.
    """
    from kv_indexer.inspect import inspect_command

    inspect_command.verify(access.url, output)


@index.command("size")
@takes_settings
def size(
    access: RedisAccess,
    output: Output = OutputForm.TABLE,
) -> None:
    """Show each source's memory in Redis: estimated from samples, and by the formula of docs/reference/redis.md."""
    from kv_indexer.inspect import inspect_command

    inspect_command.size(access.url, output)


@index.command("clear")
@takes_settings
def clear(
    access: RedisAccess,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="HOST:PORT#RANK, or HOST:PORT for all its ranks.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    output: Output = OutputForm.TABLE,
) -> None:
    """Hide all blocks of a source at once; its indexer then replays the events."""
    from kv_indexer.inspect import inspect_command

    inspect_command.clear(access.url, source, output, yes=yes)

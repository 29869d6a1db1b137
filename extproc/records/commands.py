"""The commands `kvmesh audit verify` and `kvmesh audit read`. Imports late, to start fast."""

from pathlib import Path
from typing import Annotated

import typer

from kvmesh.options import takes_settings
from kvmesh.redis.address import RedisAccess

app = typer.Typer(add_completion=False)
audit = typer.Typer(help="Check and read what pickers have written of their requests (docs/guides/audit.md).")
app.add_typer(audit, name="audit")


@audit.command("verify")
def verify(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Files of one target, in any order.")],
    key_file: Annotated[
        Path | None,
        typer.Option(help="Keys of the chain, as the pickers had them: lines `id:key`. Needed where it is keyed."),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Take it amiss where a chain's first files are not given.")
    ] = False,
    interleaved: Annotated[
        bool,
        typer.Option("--interleaved", help="Several chains may stand in one file: what `kvmesh audit read` prints."),
    ] = False,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHAIN:SEQ:HASH", help="A line that was noted elsewhere and must be there; may be repeated."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Find any change, gap, reordering, truncation or splice. Exit 0: whole; 1: not; 2: cannot tell; 3: no end."""
    from extproc.records.verify_audit import verify_files

    raise typer.Exit(
        verify_files(files, key_file=key_file, whole=whole, interleaved=interleaved, expect=expect or (), as_json=json)
    )


@audit.command("read")
@takes_settings
def read(
    access: RedisAccess,
    stream: Annotated[str, typer.Option(metavar="NAME", help="The pickers' --access-log-stream.")],
) -> None:
    """Print the lines of a Redis Stream, oldest first, as `kvmesh audit verify --interleaved` reads them."""
    import asyncio

    from extproc.records.verify_audit import print_stream

    asyncio.run(print_stream(access, name=stream))

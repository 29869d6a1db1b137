"""The commands `kvmesh audit verify` and `kvmesh audit read`. Redis is imported late, for a fast start."""

import asyncio
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from extproc.errors import ConfigError
from extproc.ledger.audit_chain import AuditKey, ChainEnd, parse_keys
from kvmesh.errors import IndexUnavailableError
from kvmesh.options import takes_settings
from kvmesh.output.forms import Output, OutputForm, in_form
from kvmesh.plain_text import printable
from kvmesh.redis.address import RedisAccess
from operate.audit.verify import MissingKeyError, Verdict, verify_chains

WHOLE, NOT_WHOLE, CANNOT_TELL, NO_END = 0, 1, 2, 3
_EXPECTED = re.compile(r"([0-9A-Za-z-]+):(\d+):([0-9a-f]{64})", re.ASCII)
ENTRIES = 500  # per XRANGE call
LONGEST_LINE = 1 << 20

app = typer.Typer(add_completion=False)
audit = typer.Typer()
app.add_typer(audit, name="audit", help="Check and read what pickers have written of their requests.")


@audit.command("verify")
def verify(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Files of one log, in any order.")],
    audit_key_file: Annotated[
        Path | None,
        typer.Option(help="Keys of the chain, as the pickers had them: lines `id:key`. Needed for a keyed chain."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Report a missing beginning of a chain.")] = False,
    interleaved: Annotated[
        bool,
        typer.Option("--interleaved", help="Allow several chains in one file, as `kvmesh audit read` prints them."),
    ] = False,
    expect: Annotated[
        list[str] | None,
        typer.Option(metavar="CHAIN:SEQ:HASH", help="A line noted elsewhere that must exist. Repeat for more."),
    ] = None,
    output: Output = OutputForm.TABLE,
) -> None:
    """Find any change, gap, reordering, truncation or splice. Exit 0: whole; 1: not; 2: unknown; 3: no end."""
    if len({file.resolve() for file in files}) != len(files):
        raise ConfigError("a file is named twice")
    try:
        verdict = verify_chains(
            ((str(file), _lines(file)) for file in files),
            keys=_keys(audit_key_file),
            now=time.time(),
            whole=whole,
            interleaved=interleaved,
            expected=[_expected(text) for text in expect or ()],
        )
    except MissingKeyError as error:
        _cannot_tell(f"{error}; give --audit-key-file")
    typer.echo(described(verdict) if output is OutputForm.TABLE else in_form(verdict, output))
    if not verdict.is_whole:
        raise typer.Exit(NOT_WHOLE)
    if not verdict.chains:
        _cannot_tell("there is no chain in it (was --audit on?)")
    raise typer.Exit(WHOLE if verdict.is_ended else NO_END)


@audit.command("read")
@takes_settings
def read(
    access: RedisAccess,
    stream: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the stream, as in the pickers' --access-log redis:NAME.")
    ],
) -> None:
    """Print the lines of a Redis Stream, oldest first, as `kvmesh audit verify --interleaved` reads them."""
    asyncio.run(print_stream(access.url, name=stream))


def described(verdict: Verdict) -> str:
    """Return the verdict as text."""
    lines = [f"{finding.where}: {finding.wrong}: {printable(finding.words)}" for finding in verdict.findings]
    lines += [f"note: {printable(note)}" for note in verdict.notes]
    lines += [
        f"chain {printable(chain.chain)} of {printable(chain.process)}: lines {chain.first_seq} to {chain.last_seq}, "
        f"{chain.decisions} decisions, {chain.dropped} dropped, {chain.state}; "
        f"anchor {printable(chain.chain)}:{chain.last_seq}:{chain.last_hash}"
        for chain in verdict.chains
    ]
    if verdict.findings:
        lines.append(f"NOT WHOLE: {len(verdict.findings)} findings in {verdict.lines} lines")
    elif verdict.chains:
        lines.append(f"whole: {verdict.lines} lines" + ("" if verdict.is_ended else ", but an end is not certain"))
    return "\n".join(lines)


async def print_stream(url: str, *, name: str) -> None:
    """Print a stream's lines, oldest first. Raise ConfigError if Redis fails."""
    from extproc.ledger.record_targets import FIELD, stream_key
    from kvmesh.redis.link import RedisLink

    link = RedisLink(url)
    after = b"-"
    try:
        while entries := await link.call(b"XRANGE", stream_key(name), after, b"+", b"COUNT", str(ENTRIES).encode()):
            for entry_id, fields in entries:
                after = b"(" + entry_id
                values = dict(zip(fields[::2], fields[1::2], strict=True))
                if FIELD in values:
                    sys.stdout.buffer.write(values[FIELD] + b"\n")
    except IndexUnavailableError as error:
        raise ConfigError(str(error)) from None
    finally:
        sys.stdout.flush()
        await link.close()


def _keys(path: Path | None) -> Mapping[str, AuditKey]:
    if path is None:
        return {}
    try:
        return parse_keys(path.read_text(encoding="utf-8"), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys of {path}: {error}") from None


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                yield line
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _expected(text: str) -> ChainEnd:
    found = _EXPECTED.fullmatch(text)
    if found is None:
        raise ConfigError(f"--expect: {text!r} is not CHAIN:SEQ:HASH")
    return ChainEnd(chain=found[1], seq=int(found[2]), hash=found[3])


def _cannot_tell(why: str) -> NoReturn:
    print(f"cannot tell: {why}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(CANNOT_TELL)

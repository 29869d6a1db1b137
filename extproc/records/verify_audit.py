"""`kvmesh audit verify` and `read`: gets the lines of audit files or of a stream, and shows what they come to."""

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from extproc.errors import ConfigError
from extproc.records.audit_chain import AuditKey, ChainEnd, parse_keys
from extproc.records.audit_redis_stream import FIELD, stream_key
from extproc.records.audit_verify import MissingKeyError, Verdict, verify_chains
from kvmesh.errors import IndexUnavailableError
from kvmesh.plain_text import printable
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.link import RedisLink

WHOLE, NOT_WHOLE, CANNOT_TELL, NO_END = 0, 1, 2, 3
_EXPECTED = re.compile(r"([0-9A-Za-z-]+):(\d+):([0-9a-f]{64})", re.ASCII)
ENTRIES = 500  # of a stream that are read at once
LONGEST_LINE = 1 << 20


def verify_files(
    files: Sequence[Path],
    *,
    key_file: Path | None,
    whole: bool,
    interleaved: bool,
    expect: Sequence[str],
    as_json: bool,
) -> int:
    """Verify, print the verdict, and return the exit code. Raise ConfigError for what cannot be read."""
    if len({file.resolve() for file in files}) != len(files):
        raise ConfigError("a file is named twice")
    keys = _keys(key_file)
    expected = [_expected(text) for text in expect]
    try:
        verdict = verify_chains(
            ((str(file), _lines(file)) for file in files),
            keys=keys,
            now=time.time(),
            whole=whole,
            interleaved=interleaved,
            expected=expected,
        )
    except MissingKeyError as error:
        print(f"cannot tell: {error}; give --key-file", file=sys.stderr)  # noqa: T201
        return CANNOT_TELL
    print(msgspec.json.encode(verdict).decode() if as_json else words(verdict))  # noqa: T201
    if not verdict.is_whole:
        return NOT_WHOLE
    if not verdict.chains:
        print("cannot tell: there is no chain in it (was --audit on?)", file=sys.stderr)  # noqa: T201
        return CANNOT_TELL
    return WHOLE if verdict.is_ended else NO_END


def words(verdict: Verdict) -> str:
    """Return the verdict for people."""
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


async def print_stream(access: RedisAccess, *, name: str) -> None:
    """Print a stream's lines, oldest first. Raise ConfigError where Redis does not give them."""
    link = RedisLink(access)
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

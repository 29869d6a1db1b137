"""A model's folder in a cache: what was fetched, its checksums, and how it appears whole or not at all.

`CACHE/org/name` is a symbolic link to a folder beside it, `.name.<commit>.<random>`, which is never changed again. To
replace it is to rename a link, so whoever reads the folder sees the old one or the new one. Processes that share the
cache need no lock: each fills a folder of its own, and the last link counts.
"""

import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from extproc.errors import KvmeshError
from extproc.models.model_folders import is_tokenizer_folder

RECORD = "kvmesh-fetched.json"
FRESH_SECONDS = 3600.0  # what nobody links to may be in use that long: by who fetches it, or by who reads it
CHUNK_BYTES = 1 << 20


class CacheError(KvmeshError):
    """The cache cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRecord:
    """What was fetched; kept beside the files as JSON."""

    repository: str
    revision: str | None  # as it was asked for
    commit: str  # what that was
    endpoint: str  # of the hub
    files: Mapping[str, "FileSum"]  # by path


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """A file's size and checksum."""

    bytes: int
    sha256: str


def read_record(folder: Path) -> FetchRecord | None:
    """Return the record of a folder, None where there is none that can be read."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=FetchRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def damage(folder: Path, record: FetchRecord) -> list[str]:
    """Return what is wrong with the files of a folder; nothing where all are as they were fetched."""
    return [f"{path} {what}" for path, sum_ in record.files.items() if (what := _damage(folder / path, sum_))]


def _damage(path: Path, expected: FileSum) -> str | None:
    try:
        found = path.stat().st_size
        if found != expected.bytes:
            return f"has {found} of {expected.bytes} bytes"
        return None if sha256_of(path) == expected.sha256 else "was changed"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def sha256_of(path: Path) -> str:
    """Return a file's checksum; raise OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def new_folder(link: Path, commit: str) -> Path:
    """Make the empty folder that `link` is to lead to; raise CacheError."""
    folder = link.with_name(f".{link.name}.{commit[:12]}.{secrets.token_hex(4)}")
    try:
        if link.is_dir() and not link.is_symlink():
            raise CacheError(f"{link} is there and was not fetched by kvmesh: remove it, or fetch into another folder")
        if any((outer / RECORD).exists() for outer in link.parents[:2]):  # names have three parts at most
            raise CacheError(f"{link} would be in another model's folder: give it another name, NAME=MODEL")
        folder.mkdir(parents=True)
    except OSError as error:
        raise CacheError(f"{folder} cannot be made ({error.strerror}): give a folder that can be written") from error
    return folder


def write_record(folder: Path, record: FetchRecord) -> None:
    """Keep the record beside the files, and all of them on the disk before anything leads there; raise OSError."""
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    for path in [*folder.rglob("*"), folder]:
        _to_disk(path)


def link_to(link: Path, folder: Path) -> None:
    """Let `link` lead to `folder` from now on, in one step; raise CacheError."""
    new = folder.with_name(f"{folder.name}.link")
    try:
        new.symlink_to(folder.name)
        new.rename(link)
        _to_disk(link.parent)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise CacheError(f"{link} cannot be made ({error.strerror}): the volume has to take symbolic links") from error


def _to_disk(path: Path) -> None:
    """Have the disk hold a file or the names of a folder: a node that loses power must not leave a cut file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network volumes cannot for folders
            raise
    finally:
        os.close(descriptor)


def remove_old(link: Path) -> None:
    """Remove what `link` does not lead to, unless it is so young that somebody may use it."""
    current = link.resolve()
    for old in link.parent.glob(f".{link.name}.*"):
        try:
            if time.time() - old.lstat().st_mtime < FRESH_SECONDS:
                continue
            if old.is_symlink():
                old.unlink()  # a fetch ended before it was renamed
            elif old.resolve() != current:
                shutil.rmtree(old)
        except OSError:
            continue  # another process removes it, or owns it


def kept_models(cache: Path) -> Iterator[tuple[str, Path, FetchRecord | None]]:
    """Yield each folder that a picker would find in the cache: the model's name, the folder, its record."""
    for depth in ("*", "*/*", "*/*/*"):
        for folder in sorted(cache.glob(depth)):
            name = folder.relative_to(cache)
            if any(part.startswith(".") for part in name.parts) or not folder.is_dir():
                continue
            if (folder / RECORD).is_file() or is_tokenizer_folder(folder):
                yield str(name), folder, read_record(folder)


def as_json(record: FetchRecord) -> dict[str, Any]:
    """Return what people ask about a record."""
    return {
        "repository": record.repository,
        "revision": record.revision,
        "commit": record.commit,
        "files": len(record.files),
        "bytes": sum(each.bytes for each in record.files.values()),
    }

"""Secret files, which may be rewritten at any time: detects changes and reads a bounded content."""

import stat
from pathlib import Path

from kvmesh.errors import SettingError

MAX_FILE_BYTES = 65536


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return a stamp that differs after each rewrite of the file; () if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)


def read_secret(path: Path, *, what: str) -> bytes:
    """Return the file's bytes. Raise SettingError with the fault of the file, but not its content.

    `what` is the secret's name in messages.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer, and block everything else
            raise SettingError(f"{path} is no file with a {what}: pipes and folders cannot be read again and again")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingError(f"the {what} file {path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise SettingError(f"the {what} file {path} is longer than {MAX_FILE_BYTES} bytes")
    return content

"""Files with secrets, which somebody may write anew at any time: when one has changed, and what it holds, bounded."""

import stat
from pathlib import Path

from kvmesh.errors import SettingError

MAX_FILE_BYTES = 65536


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return what differs once the file was written anew; () where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)


def read_secret(path: Path, *, what: str) -> bytes:
    """Return the file's bytes. Raise SettingError saying what is wrong with the file, but not what it says.

    `what` is the secret's name in messages.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe waits for who writes, and all else would wait, too
            raise SettingError(f"{path} is no file with a {what}: pipes and folders cannot be read again and again")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingError(f"the {what} file {path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise SettingError(f"the {what} file {path} is longer than {MAX_FILE_BYTES} bytes")
    return content

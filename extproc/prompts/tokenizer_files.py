"""What a model's folder looks like from outside: enough to tell that its files are others now. Reads no content."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TypeAlias

# a tuple of each file, or of what stands in its way; compared only
FolderFiles: TypeAlias = frozenset[tuple[str, int, int, int, int]]

MOST_NAMES = 2_000  # of one folder: nobody's has more, and one that has costs no more time
READ = (".json", ".jinja", ".model", ".txt")  # vocabularies and merges are texts; weights say by their names alone


def folder_files(folder: Path | None, template: Path | None) -> FolderFiles:
    """Return the files by name, size, time of change, device and inode; weights by their names. Never raises.

    Links are followed: a ConfigMap's files and those of an atomically swapped volume are links to a folder that is
    exchanged for another one.
    """
    found = [] if folder is None else [*_in_folder(folder), *_in_folder(folder / "additional_chat_templates")]
    if template is not None:
        found.append(_of_file(template.name, template))
    return frozenset(found)


def _in_folder(folder: Path) -> Iterator[tuple[str, int, int, int, int]]:
    try:
        names = [path.name for path in islice(folder.iterdir(), MOST_NAMES)]
    except OSError as error:
        yield str(folder), 0, 0, 0, -(error.errno or 1)
        return
    for name in names:
        is_read = name.endswith(READ) or name.startswith("tokenizer")
        yield _of_file(name, folder / name) if is_read else (name, 0, 0, 0, 0)


def _of_file(name: str, path: Path) -> tuple[str, int, int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        return name, 0, 0, 0, -(error.errno or 1)
    return name, status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino

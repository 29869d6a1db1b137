"""Writes rendered files into a folder of the repository, and removes those that are no longer made. For developers."""

from collections.abc import Iterable, Mapping
from pathlib import Path


def write_tree(folder: Path, files: Mapping[str, str], *, old: Iterable[Path]) -> None:
    """Write `files`, by their path within `folder`; of the `old` ones remove those that are not among them."""
    for path in sorted(old):
        if str(path.relative_to(folder)) not in files:
            path.unlink()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

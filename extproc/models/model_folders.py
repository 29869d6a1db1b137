"""Find a model's tokenizer folder in a parent folder, by one of its served names.

Pods may report anything: only a plain name is used as a path.
"""

import re
from dataclasses import replace
from pathlib import Path

from extproc.models.models import ServedModel, TokensFrom

# any of these marks a tokenizer folder; Mistral's SentencePiece files have a version in their names
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tokenizer.model.v*")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def with_found_folder(model: ServedModel, folders: Path | None) -> ServedModel:
    """Return the model with the folder of its first name that has one, unless the source of its tokens is configured.

    `org/model` is a folder in a folder; names that could lead elsewhere are skipped.
    """
    if folders is None or model.tokens_from is not TokensFrom.AUTO or model.tokenizer_folder is not None:
        return model
    names = (model.name, *sorted(model.aliases))
    paths = (folders.joinpath(*parts) for name in names if (parts := folder_parts(name)) is not None)
    folder = next(filter(is_tokenizer_folder, paths), None)
    return model if folder is None else replace(model, tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=folder)


def is_tokenizer_folder(folder: Path) -> bool:
    """Tell whether the folder has a tokenizer file; other files may be missing."""
    return any(path.is_file() for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def folder_parts(name: str) -> list[str] | None:
    """Split a model's name into path parts, or return None if it could lead outside the parent folder."""
    parts = name.split("/")
    return parts if len(parts) <= 3 and all(map(_PART.fullmatch, parts)) else None

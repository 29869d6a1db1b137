"""Which folder a model's tokenizer is in, below a folder of folders: by a name that its pods serve it under.

Pods may report anything: a name is used as a path only where it is plain.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from extproc.models.models import ServedModel, TokensFrom

# one of them makes a folder; those of SentencePiece that Mistral has made say their version in the name
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tokenizer.model.v*")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def with_found_folder(model: ServedModel, folders: Path | None) -> ServedModel:
    """Return the model with the folder that is found for it, where nobody has said where its tokens come from."""
    if model.tokens_from is not TokensFrom.AUTO or model.tokenizer_folder is not None:
        return model
    folder = find_folder((model.name, *sorted(model.aliases)), folders)
    return model if folder is None else replace(model, tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=folder)


def find_folder(names: Iterable[str], folders: Path | None) -> Path | None:
    """Return the folder of the first name that has one; None where there is none, or where names could lead elsewhere.

    `org/model` is a folder in a folder.
    """
    if folders is None:
        return None
    paths = (folders.joinpath(*parts) for name in names if (parts := folder_parts(name)) is not None)
    return next(filter(is_tokenizer_folder, paths), None)


def is_tokenizer_folder(folder: Path) -> bool:
    """Tell whether the folder has a tokenizer, whatever else it lacks."""
    return any(path.is_file() for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def folder_parts(name: str) -> list[str] | None:
    """Return the folders that a model's name stands for, None where it could lead elsewhere."""
    parts = name.split("/")
    return parts if len(parts) <= 3 and all(map(_PART.fullmatch, parts)) else None

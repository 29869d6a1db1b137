"""The models of a pool whose policy declares none: as its pods report them, with tokenizers from a folder of folders.

Pods may report anything: a name is used as a path below the folder only where it is plain, and no pool learns more than
a few models.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from extproc.models.models import ServedModel, TokensFrom
from extproc.pods.endpoint import EndpointModels

MOST_MODELS, MOST_ALIASES = 8, 16  # of one pool: names may be labels of metrics
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # one of them makes a folder


def learned_models(reported: Iterable[EndpointModels | None], *, folders: Path | None) -> tuple[ServedModel, ...]:
    """Return the models by their first names, which the indexer uses; further names of a pod are aliases.

    `folders` has one folder for each model, by name (`org/model` is a folder in a folder); the pods of
    others are asked.
    Sorted by name, so that the order in which pods answer does not count.
    """
    aliases: dict[str, set[str]] = {}
    for models in reported:
        if models is not None and models.first:
            aliases.setdefault(models.first, set()).update(models.models)
    firsts = sorted(aliases)[:MOST_MODELS]
    return tuple(_model(name, aliases[name] - set(firsts), folders=folders) for name in firsts)


def _model(name: str, aliases: set[str], *, folders: Path | None) -> ServedModel:
    folder = _folder(name, folders)
    return ServedModel(
        name=name,
        aliases=frozenset(sorted(aliases)[:MOST_ALIASES]),
        tokens_from=TokensFrom.AUTO if folder is None else TokensFrom.TOKENIZER,
        tokenizer_folder=folder,
    )


def _folder(name: str, folders: Path | None) -> Path | None:
    """Return the model's folder; None where there is none, or where the name could lead elsewhere."""
    parts = folder_parts(name)
    if folders is None or parts is None:
        return None
    folder = folders.joinpath(*parts)
    return folder if any((folder / each).is_file() for each in TOKENIZER_FILES) else None


def folder_parts(name: str) -> list[str] | None:
    """Return the folders that a model's name stands for, None where it could lead elsewhere."""
    parts = name.split("/")
    return parts if len(parts) <= 3 and all(map(_PART.fullmatch, parts)) else None

"""The models of a pool whose policy declares none: as its pods report them, with tokenizers from a folder of folders.

Pods may report anything: no pool learns more than a few models.
"""

from collections.abc import Iterable
from pathlib import Path

from extproc.models.model_folders import with_found_folder
from extproc.models.models import ServedModel
from extproc.pods.endpoint import EndpointModels

MOST_MODELS, MOST_ALIASES = 8, 16  # of one pool: names may be labels of metrics


def learned_models(reported: Iterable[EndpointModels | None], *, folders: Path | None) -> tuple[ServedModel, ...]:
    """Return the models by their first names, which the indexer uses; further names of a pod are aliases.

    `folders` has one folder for each model, by a name of it (`org/model` is a folder in a folder); the pods of others
    are asked.
    Sorted by name, so that the order in which pods answer does not count.
    """
    aliases: dict[str, set[str]] = {}
    for models in reported:
        if models is not None and models.first:
            aliases.setdefault(models.first, set()).update(models.models)
    firsts = sorted(aliases)[:MOST_MODELS]
    return tuple(with_found_folder(_model(name, aliases[name] - set(firsts)), folders) for name in firsts)


def _model(name: str, aliases: set[str]) -> ServedModel:
    return ServedModel(name=name, aliases=frozenset(sorted(aliases)[:MOST_ALIASES]))

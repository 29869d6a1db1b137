"""The models of a pool whose policy declares none: from its pods' reports, with tokenizers from a parent folder.

Pods may report anything, so the number of models per pool is bounded.
"""

from collections.abc import Iterable
from pathlib import Path

from extproc.models.model_folders import with_found_folder
from extproc.models.models import ServedModel
from extproc.pods.endpoint import EndpointModels

MOST_MODELS, MOST_ALIASES = 8, 16  # models per pool, aliases per model: names may be labels of metrics


def learned_models(reported: Iterable[EndpointModels | None], *, folders: Path | None) -> tuple[ServedModel, ...]:
    """Return the models under their first names, which the indexer uses; a pod's other names are aliases.

    `folders` has a tokenizer folder per model, under one of its names (`org/model` is a folder in a folder). For models
    without one, the pods are asked for tokens. Sorted by name, so that the order of the pods' answers does not matter.
    """
    aliases: dict[str, set[str]] = {}
    for models in reported:
        if models is not None and models.first:
            aliases.setdefault(models.first, set()).update(models.models)
    firsts = sorted(aliases)[:MOST_MODELS]
    return tuple(with_found_folder(_model(name, aliases[name] - set(firsts)), folders) for name in firsts)


def _model(name: str, aliases: set[str]) -> ServedModel:
    return ServedModel(name=name, aliases=frozenset(sorted(aliases)[:MOST_ALIASES]))

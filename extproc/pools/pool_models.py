"""Which models a pool serves: its policies', then the picker's own, by the names that their blocks are indexed with."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from extproc.models.model_folders import with_found_folder
from extproc.models.models import ModelTable, ServedModel
from extproc.policy.pool_config import PoolConfig
from extproc.prompts.tokenizer_cache import TokenizerCache, without_missing


def models_of(
    config: PoolConfig, own: Sequence[ServedModel], tokenizers: TokenizerCache, *, folders: Path | None
) -> ModelTable:
    """Return the pool's models; of those whose tokenizers are not loaded yet the pods are asked."""
    return without_missing(declared_models(config, own, folders=folders), tokenizers)


def declared_models(config: PoolConfig, own: Sequence[ServedModel], *, folders: Path | None = None) -> ModelTable:
    """Return the pool's models, with the picker's own (`--models`, `--model`) where the policy says nothing of them.

    Those that nothing is said of have the tokenizer folders of their names below `folders`.
    """
    known = config.models.names()
    further = [model for model in own if model.name not in known and config.model in (None, model.name, *model.aliases)]
    served = [_as_told(model, config.learned) for model in (*config.models.served, *further)]
    served = [as_indexed(model, config.model) for model in served]
    found = [with_found_folder(model, folders) for model in _once((*served, *_unknown(config, served)))]
    return replace(config.models, served=tuple(found))


def as_indexed(model: ServedModel, indexed: str | None) -> ServedModel:
    """Return the model under the name that the indexer computes its blocks with, where that is one of its aliases."""
    if indexed is None or indexed not in model.aliases:
        return model
    return replace(model, name=indexed, aliases=(model.aliases - {indexed}) | {model.name})


def _as_told(model: ServedModel, learned: Sequence[ServedModel]) -> ServedModel:
    """Return the model with the names that its pods tell, under the one that its blocks are indexed with."""
    names = {model.name, *model.aliases}
    for told in learned:
        if not names.isdisjoint((told.name, *told.aliases)):
            return replace(model, name=told.name, aliases=(told.aliases | names) - {told.name})
    return model


def _unknown(config: PoolConfig, served: Sequence[ServedModel]) -> list[ServedModel]:
    """Return those models that only the pods tell of; none where a policy lists all there are."""
    known = {name for model in served for name in (model.name, *model.aliases)}
    return [] if config.models.only_listed else [each for each in config.learned if each.name not in known]


def _once(served: Sequence[ServedModel]) -> tuple[ServedModel, ...]:
    """Return the models with each name at the first that has it: what several pods tell may overlap."""
    seen: set[str] = set()
    kept = []
    for model in served:
        if model.name not in seen:
            kept.append(replace(model, aliases=model.aliases - seen) if model.aliases & seen else model)
            seen.update((model.name, *model.aliases))
    return tuple(kept)

"""The models that a pool serves: its policies', then the picker's own, under the names that the indexer uses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from extproc.models.model_folders import with_found_folder
from extproc.models.models import ModelTable, ServedModel
from extproc.policy.values import PoolConfig
from extproc.prompts.tokenizer_cache import TokenizerCache, without_missing


def models_of(
    config: PoolConfig, own: Sequence[ServedModel], tokenizers: TokenizerCache, *, folders: Path | None
) -> ModelTable:
    """Return the pool's models; models whose tokenizers are not loaded yet ask their pods instead."""
    return without_missing(declared_models(config, own, folders=folders), tokenizers)


def declared_models(config: PoolConfig, own: Sequence[ServedModel], *, folders: Path | None = None) -> ModelTable:
    """Return the pool's models, and the picker's own (`--model`) that the policy does not mention.

    A model without a declared token source uses the tokenizer folder of its name below `folders`, if there is one.
    """
    known = config.models.names()
    further = [model for model in own if model.name not in known and config.model in (None, model.name, *model.aliases)]
    served = [_as_told(model, config.learned) for model in (*config.models.served, *further)]
    served = [as_indexed(model, config.model) for model in served]
    found = [with_found_folder(model, folders) for model in _once((*served, *_unknown(config, served)))]
    return replace(config.models, served=tuple(found))


def as_indexed(model: ServedModel, indexed: str | None) -> ServedModel:
    """Return the model under the name by which the indexer computes its block keys, if that is one of its aliases."""
    if indexed is None or indexed not in model.aliases:
        return model
    return replace(model, name=indexed, aliases=(model.aliases - {indexed}) | {model.name})


def _as_told(model: ServedModel, learned: Sequence[ServedModel]) -> ServedModel:
    """Return the model with its pods' names added, under the name that its blocks are indexed with."""
    names = {model.name, *model.aliases}
    for told in learned:
        if not names.isdisjoint((told.name, *told.aliases)):
            return replace(model, name=told.name, aliases=(told.aliases | names) - {told.name})
    return model


def _unknown(config: PoolConfig, served: Sequence[ServedModel]) -> list[ServedModel]:
    known = {name for model in served for name in (model.name, *model.aliases)}
    return [] if config.models.only_listed else [each for each in config.learned if each.name not in known]


def _once(served: Sequence[ServedModel]) -> tuple[ServedModel, ...]:
    """Keep each name only for the first model that has it: the pods' names may overlap."""
    seen: set[str] = set()
    kept = []
    for model in served:
        if model.name not in seen:
            kept.append(replace(model, aliases=model.aliases - seen) if model.aliases & seen else model)
            seen.update((model.name, *model.aliases))
    return tuple(kept)

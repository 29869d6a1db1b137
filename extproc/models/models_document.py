"""The `models` setting (YAML or JSON, already parsed) -> ModelTable; strict: an error names the path of what is wrong.

docs/models.md describes the document. Folders are not opened here.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from extproc.errors import ConfigError
from extproc.models.models import ModelRule, ModelTable, ModelTarget, ServedModel, StickyBy, TokensFrom


def parse_models(document: object, *, path: str = "models") -> ModelTable:
    """Read the setting; raise ConfigError with the path, such as `models.served[0].tokens`."""
    if document is None:
        return ModelTable()
    found = _object(document, path, ("served", "rules", "only_listed"))
    table = ModelTable(
        served=tuple(_list(found, "served", path, _served_model)),
        rules=tuple(_list(found, "rules", path, _rule)),
        only_listed=_boolean(found, "only_listed", path, default=False),
    )
    _require_single_names(table, path)
    if table.only_listed:
        _require_targets_are_served(table, path)
    return table


def _served_model(item: object, path: str) -> ServedModel:
    found = _object(
        item,
        path,
        (
            *("name", "aliases", "adapters", "tokens", "tokenizer", "chat_template", "chat_template_kwargs"),
            "max_model_len",
        ),
    )
    folder = _path(found, "tokenizer", path)
    tokens = _choice(found, "tokens", path, TokensFrom, default=TokensFrom.TOKENIZER if folder else TokensFrom.TEXT)
    if tokens is TokensFrom.TOKENIZER and folder is None:
        raise ConfigError(f"{path}.tokenizer is missing: tokens from a tokenizer need its folder")
    max_model_len = found.get("max_model_len")
    if max_model_len is not None and (type(max_model_len) is not int or max_model_len < 1):
        raise ConfigError(f"{path}.max_model_len must be a whole number of tokens, at least 1, not {max_model_len!r}")
    kwargs = found.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise ConfigError(f"{path}.chat_template_kwargs must be an object, not {kwargs!r}")
    return ServedModel(
        name=_name(found, "name", path),
        aliases=frozenset(_strings(found, "aliases", path)),
        adapters=frozenset(_strings(found, "adapters", path)),
        tokens_from=tokens,
        tokenizer_folder=folder,
        chat_template=_path(found, "chat_template", path),
        chat_template_kwargs=kwargs,
        max_model_len=max_model_len,
    )


def _rule(item: object, path: str) -> ModelRule:
    found = _object(item, path, ("model", "targets", "sticky_by", "sticky_header", "fallbacks"))
    sticky_by = _choice(found, "sticky_by", path, StickyBy, default=StickyBy.NOTHING)
    header = _text(found, "sticky_header", path)
    if (header is not None) != (sticky_by is StickyBy.HEADER):
        raise ConfigError(f"{path}.sticky_header is needed with sticky_by: header, and only there")
    targets = tuple(_list(found, "targets", path, _target))
    if not targets:
        raise ConfigError(f"{path}.targets is missing: name the models that serve {found.get('model')!r}")
    if not 0 < sum(target.weight for target in targets) < float("inf"):
        raise ConfigError(f"{path}.targets: at least one weight must be above 0")
    if len({target.model for target in targets}) < len(targets):
        raise ConfigError(f"{path}.targets: a model is named twice; add its weights up")
    fallbacks = _strings(found, "fallbacks", path)
    if len(set(fallbacks)) < len(fallbacks):
        raise ConfigError(f"{path}.fallbacks: a model is named twice")
    return ModelRule(
        model=_name(found, "model", path),
        targets=targets,
        sticky_by=sticky_by,
        sticky_header=header.lower() if header is not None else None,
        fallbacks=fallbacks,
    )


def _target(item: object, path: str) -> ModelTarget:
    if isinstance(item, str):
        return ModelTarget(model=_string(item, path))
    found = _object(item, path, ("model", "weight"))
    weight = found.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise ConfigError(f"{path}.weight must be a number >= 0, not {weight!r}")
    return ModelTarget(model=_name(found, "model", path), weight=float(weight))


def _require_single_names(table: ModelTable, path: str) -> None:
    claimed: dict[str, str] = {}
    for i, model in enumerate(table.served):
        where = f"{path}.served[{i}]"
        for name in (model.name, *sorted(model.aliases), *sorted(model.adapters)):
            if name in claimed:
                raise ConfigError(f"{where}: the name {name!r} is already that of {claimed[name]}")
            claimed[name] = where
    ruled: dict[str, str] = {}
    for i, rule in enumerate(table.rules):
        if rule.model in ruled:
            raise ConfigError(f"{path}.rules[{i}].model: {rule.model!r} has a rule already, {ruled[rule.model]}")
        ruled[rule.model] = f"{path}.rules[{i}]"


def _require_targets_are_served(table: ModelTable, path: str) -> None:
    for i, rule in enumerate(table.rules):
        for name in (*(target.model for target in rule.targets), *rule.fallbacks):
            if table.served_as(name) is None and table.base_of(name) is None:
                raise ConfigError(
                    f"{path}.rules[{i}]: {name!r} is neither a served model nor an adapter in {path}.served, "
                    "and only_listed refuses all others"
                )


# --- reading values with their path -----------------------------------------------------------------------------------


def _object(value: object, path: str, known: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must be an object, not {value!r}")
    for key in value:
        if key not in known:
            raise ConfigError(f"{path}.{key} is not a setting; there are {', '.join(known)}")
    return value


def _list(found: Mapping[str, Any], key: str, path: str, read: Callable[[object, str], Any]) -> list[Any]:
    value = found.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{path}.{key} must be a list, not {value!r}")
    return [read(item, f"{path}.{key}[{i}]") for i, item in enumerate(value)]


def _text(found: Mapping[str, Any], key: str, path: str) -> str | None:
    value = found.get(key)
    return None if value is None else _string(value, f"{path}.{key}")


def _name(found: Mapping[str, Any], key: str, path: str) -> str:
    value = _text(found, key, path)
    if value is None:
        raise ConfigError(f"{path}.{key} is missing")
    return value


def _strings(found: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    return tuple(_list(found, key, path, _string))


def _string(item: object, path: str) -> str:
    if not isinstance(item, str) or not item:
        raise ConfigError(f"{path} must be a text, not {item!r}")
    return item


def _path(found: Mapping[str, Any], key: str, path: str) -> Path | None:
    value = _text(found, key, path)
    return Path(value) if value is not None else None


def _boolean(found: Mapping[str, Any], key: str, path: str, *, default: bool) -> bool:
    value = found.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{path}.{key} must be true or false, not {value!r}")
    return value


def _choice(found: Mapping[str, Any], key: str, path: str, choices: type[StrEnum], *, default: Any) -> Any:
    value = found.get(key)
    if value is None:
        return default
    if value not in list(choices):
        raise ConfigError(f"{path}.{key} must be one of {', '.join(choices)}, not {value!r}")
    return choices(value)

"""What a running picker tells of its settings to who may see its admin pages: what `kvmesh doctor` checks a mesh by.

The names are those of the flags. Passwords and keys are not among it, only the files that they are in. A seed of the
deployment's own is a key, too: the names of sessions and tenants are in Redis as hashes that it keys. Pure.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from extproc.errors import ConfigError
from extproc.policy.values import Steering
from extproc.settings.config import PickerSettings, read_models
from kvmesh.pods.pod_access import PodAccess
from kvmesh.redis.address import RedisAccess, read_address
from kvmesh.settings import options_of

# flag -> the field of PickerSettings, where the value is the same in both
SAME: Mapping[str, str] = {
    "kubernetes": "kubernetes",
    "root_namespace": "root_namespace",
    "model": "model",
    "grpc_port": "grpc_port",
}
FILES: Mapping[str, str] = {
    "policies": "policies_folder",
    "tokenizer": "tokenizer_folder",
    "tokenizers": "tokenizer_folders",
}

OPEN_SEED = PickerSettings().hash_seed  # everybody's who has not chosen one: no secret


class ShownSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/settings`."""

    endpoints: Sequence[str]
    hash_seed: str | None  # None: one of its own, which is not shown
    steering: str
    redis: str  # without user and password
    kubernetes: bool = False
    policies: str | None = None
    root_namespace: str = ""
    namespaces: Sequence[str] = ()
    model: str | None = None
    tokenizer: str | None = None
    tokenizers: str | None = None
    models: Mapping[str, Any] | None = None
    grpc_port: int = 0
    index_timeout_ms: float = 0.0
    redis_has_password: bool = False  # in its address, which is not shown
    redis_options: Mapping[str, str] = {}  # beside the address, by their flags
    pod_key_file: str | None = None


def shown_settings(settings: PickerSettings) -> ShownSettings:
    """Return what is shown of a picker's settings."""
    address = read_address(settings.redis_url)
    beside = {option.flag: getattr(address.access, name) for name, option in options_of(RedisAccess).items()}
    files: dict[str, Any] = {flag: _text(getattr(settings, name)) for flag, name in FILES.items()}
    return ShownSettings(
        endpoints=settings.endpoints,
        hash_seed=settings.hash_seed if settings.hash_seed == OPEN_SEED else None,
        namespaces=sorted(settings.namespaces),
        models=settings.policy_fields.get("models"),
        steering=settings.steering.value,
        index_timeout_ms=settings.index_timeout_seconds * 1000,
        redis=address.label,
        redis_has_password=bool(address.password or (address.username and not address.access.username)),
        redis_options={flag: str(value) for flag, value in beside.items() if value and flag != "redis"},
        pod_key_file=_text(settings.pod_access.key_file),
        **{flag: getattr(settings, name) for flag, name in SAME.items()},
        **files,
    )


def taken_over(shown: ShownSettings, settings: PickerSettings, *, given: Collection[str]) -> PickerSettings:
    """Return the settings with the picker's, but for those flags that are given. Raise ConfigError."""
    values = {name: getattr(shown, flag) for flag, name in SAME.items() if flag not in given}
    values |= {name: _path(getattr(shown, flag)) for flag, name in FILES.items() if flag not in given}
    if "endpoints" not in given:
        values["endpoints"] = tuple(shown.endpoints)
    if "hash_seed" not in given:
        values["hash_seed"] = _seed(shown.hash_seed)
    if "namespaces" not in given:
        values["namespaces"] = frozenset(shown.namespaces)
    if "models" not in given and shown.models:
        values["models"] = read_models(msgspec.json.encode(shown.models).decode())
    if "steering" not in given:
        values["steering"] = _steering(shown.steering)
    if "index_timeout_ms" not in given:
        values["index_timeout_seconds"] = shown.index_timeout_ms / 1000
    if "redis" not in given:
        values["redis_url"] = _access(shown)
    if "pod_key_file" not in given:
        values["pod_access"] = PodAccess(key_file=_path(shown.pod_key_file))
    return replace(settings, **values)


def files_of(shown: ShownSettings) -> Iterator[tuple[str, str]]:
    """Yield the files and folders that the settings name, each with its flag: they may be on another machine."""
    for flag in (*FILES, "pod_key_file"):
        if path := getattr(shown, flag):
            yield flag, path
    for flag, text in shown.redis_options.items():
        if flag.endswith("_file"):
            yield flag, text


def without(shown: ShownSettings, flags: Collection[str]) -> ShownSettings:
    """Return the settings without these files."""
    kept = {flag: text for flag, text in shown.redis_options.items() if flag not in flags}
    gone = {flag: None for flag in flags if flag in (*FILES, "pod_key_file")}
    return msgspec.structs.replace(shown, redis_options=kept, **gone)


def _steering(name: str) -> Steering:
    try:
        return Steering(name)
    except ValueError:
        raise ConfigError(f"the picker steers by {name!r}, which this version does not know: give --steering") from None


def _seed(seed: str | None) -> str:
    if seed is None:
        raise ConfigError("the picker has a --hash-seed of its own, which it does not show: give --hash-seed")
    return seed


def _access(shown: ShownSettings) -> RedisAccess:
    names = {option.flag: name for name, option in options_of(RedisAccess).items()}
    values: dict[str, Any] = {
        names[flag]: Path(text) if flag.endswith("_file") else text
        for flag, text in shown.redis_options.items()
        if flag in names
    }
    return RedisAccess(url=shown.redis, **values)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)

"""The settings that a running picker shows on its admin pages; `kvmesh doctor` uses them to check a mesh.

The names are those of the flags. Passwords and keys are never shown, only their files. A custom hash seed is a key,
too: it keys the hashes of session and tenant names in Redis. Pure.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from extproc.errors import ConfigError
from extproc.policy.inference_policy import read_section
from extproc.policy.merged_policy import pick_policy
from extproc.policy.values import Steering
from extproc.settings.config import PickerSettings
from kvmesh.pods.pod_access import PodAccess
from kvmesh.redis.address import PATHS, read_address

SAME = ("kubernetes", "root_namespace", "model", "grpc_port")  # fields with the name of their flag, shown unchanged
# flag -> the field of PickerSettings
FILES: Mapping[str, str] = {
    "policies": "policies_folder",
    "tokenizer": "tokenizer_folder",
    "tokenizers": "tokenizer_folders",
}

OPEN_SEED = PickerSettings().hash_seed  # the default, not a secret


class ShownSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/settings`."""

    endpoints: Sequence[str]
    hash_seed: str | None  # None for a custom one, which is not shown
    steering: str
    redis: str  # without password
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
    redis_has_password: bool = False  # in the address; not shown
    pod_key_file: str | None = None


def shown_settings(settings: PickerSettings) -> ShownSettings:
    """Return the shown part of a picker's settings."""
    address = read_address(settings.redis_url)
    files: dict[str, Any] = {flag: _text(getattr(settings, name)) for flag, name in FILES.items()}
    return ShownSettings(
        endpoints=settings.endpoints,
        hash_seed=settings.hash_seed if settings.hash_seed == OPEN_SEED else None,
        namespaces=sorted(settings.namespaces),
        models=settings.policy_fields.get("models"),
        steering=settings.steering.value,
        index_timeout_ms=settings.index_timeout_seconds * 1000,
        redis=address.shown,
        redis_has_password=bool(address.password),
        pod_key_file=_text(settings.pod_access.key_file),
        **{name: getattr(settings, name) for name in SAME},
        **files,
    )


def taken_over(shown: ShownSettings, settings: PickerSettings, *, given: Collection[str]) -> PickerSettings:
    """Return `settings` with the picker's values, except for the `given` flags. Raise ConfigError."""
    values = {name: getattr(shown, name) for name in SAME if name not in given}
    values |= {name: _path(getattr(shown, flag)) for flag, name in FILES.items() if flag not in given}
    if "endpoints" not in given:
        values["endpoints"] = tuple(shown.endpoints)
    if "hash_seed" not in given:
        if shown.hash_seed is None:
            raise ConfigError("the picker has a --hash-seed of its own, which it does not show: give --hash-seed")
        values["hash_seed"] = shown.hash_seed
    if "namespaces" not in given:
        values["namespaces"] = frozenset(shown.namespaces)
    if "policy" not in given and shown.models:
        values["models"] = pick_policy(read_section("models", shown.models))[1]
    if "steering" not in given:
        values["steering"] = _steering(shown.steering)
    if "index_timeout_ms" not in given:
        values["index_timeout_seconds"] = shown.index_timeout_ms / 1000
    if "redis" not in given:
        values["redis_url"] = shown.redis
    if "pod_key_file" not in given:
        values["pod_access"] = PodAccess(key_file=_path(shown.pod_key_file))
    return replace(settings, **values)


def files_of(shown: ShownSettings) -> Iterator[tuple[str, str]]:
    """Yield the flags and paths of the settings' files and folders, which may be on another machine."""
    for flag in (*FILES, "pod_key_file"):
        if path := getattr(shown, flag):
            yield flag, path
    yield from (("redis", path) for name, path in parse_qsl(shown.redis.partition("?")[2]) if name in PATHS)


def without(shown: ShownSettings, paths: Collection[str]) -> ShownSettings:
    """Return the settings without these files."""
    gone = {flag: None for flag in (*FILES, "pod_key_file") if getattr(shown, flag) in paths}
    address, _, query = shown.redis.partition("?")
    kept = [(name, value) for name, value in parse_qsl(query) if value not in paths]
    redis = f"{address}?{urlencode(kept, safe='/')}" if kept else address
    return msgspec.structs.replace(shown, redis=redis, **gone)


def _steering(name: str) -> Steering:
    try:
        return Steering(name)
    except ValueError:
        raise ConfigError(f"the picker steers by {name!r}, which this version does not know: give --steering") from None


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)

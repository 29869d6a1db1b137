"""The value of a patch as istiod of a release reads it: JSON to a typed message, unknown fields dropped.

The rules of Go's legacy jsonpb with unknown fields allowed: an unknown field vanishes silently, an unknown type in an
Any and an unknown name of an enum are errors, an enum's number passes.
"""

import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseError

from tests.istiod.envoy_api import TYPE_URL, descriptor, new
from tests.istiod.releases import Release

ANY = "google.protobuf.Any"
DURATION = "google.protobuf.Duration"
UNITS_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class UndecodableError(Exception):
    """istiod would refuse the value."""


class Decoder:
    """Decodes values for one release."""

    def __init__(self, release: Release) -> None:
        self._release = release
        self.dropped: list[str] = []  # paths of fields that the release does not know

    def message(self, type_name: str, value: Mapping[str, Any]) -> Any:
        """Return the message; raise UndecodableError."""
        known = self._fields(descriptor(type_name), value, path="")
        try:
            return new(type_name, known)
        except ParseError as error:
            raise UndecodableError(str(error)) from error

    def _fields(self, of: Any, value: Any, *, path: str) -> Any:
        if of.full_name == ANY:
            return self._any(value, path=path)
        if of.full_name == DURATION:
            return _duration(value, path=path)
        if of.full_name.startswith("google.protobuf."):
            return value  # wrappers, structs: JSON of their own
        if not isinstance(value, Mapping):
            raise UndecodableError(f"{path}: {of.full_name} is not {value!r}")
        known = {}
        for name, content in value.items():
            field = of.fields_by_name.get(name) or of.fields_by_camelcase_name.get(name)
            where = f"{path}.{name}" if path else name
            if field is None or not self._release.knows_field(field.full_name):
                self.dropped.append(where)
            elif content is not None:
                known[field.name] = self._field(field, content, path=where)
        return known

    def _any(self, value: Any, *, path: str) -> Any:
        url = value.get("@type") if isinstance(value, Mapping) else None
        if not url:
            raise UndecodableError(f"{path}: an Any without @type")
        type_name = url.removeprefix(TYPE_URL)
        if not self._release.registers(type_name.rpartition(".")[0]):
            raise UndecodableError(f'{path}: could not resolve Any message type "{url}" in Istio {self._release.name}')
        try:
            of = descriptor(type_name)
        except KeyError:
            raise UndecodableError(f'{path}: could not resolve Any message type "{url}"') from None
        content = {name: part for name, part in value.items() if name != "@type"}
        return {"@type": url} | self._fields(of, content, path=path)

    def _field(self, field: Any, value: Any, *, path: str) -> Any:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name["value"]
            return {key: self._one(entry, part, path=f"{path}[{key}]") for key, part in value.items()}
        if field.is_repeated:
            return [self._one(field, part, path=f"{path}[{i}]") for i, part in enumerate(value)]
        return self._one(field, value, path=path)

    def _one(self, field: Any, value: Any, *, path: str) -> Any:
        if field.message_type is not None:
            return self._fields(field.message_type, value, path=path)
        if field.enum_type is not None and isinstance(value, str):
            full_name = f"{field.enum_type.full_name}.{value}"
            if value not in field.enum_type.values_by_name or not self._release.knows_enum_name(full_name):
                raise UndecodableError(f'{path}: unknown value "{value}" for enum {field.enum_type.full_name}')
        return value


def _duration(value: Any, *, path: str) -> str:
    """Return protobuf's form of a Go duration: 1h, 60s, 200ms, 1m30s."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h)", value) if isinstance(value, str) else []
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise UndecodableError(f"{path}: {value!r} is no duration")
    return f"{sum(float(number) * UNITS_SECONDS[unit] for number, unit in parts):.9f}s"

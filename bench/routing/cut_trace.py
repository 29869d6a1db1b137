"""Makes `bench/data/mooncake_conversation_cut.jsonl` out of the whole trace: `python -m bench.routing.cut_trace FILE`.

Keeps whole conversations, told apart by their second block (every request begins with the same first one), so that
the cut repeats itself as much as the whole. FILE is `FAST25-release/traces/conversation_trace.jsonl` of
kvcache-ai/Mooncake.
"""

import argparse
import json
import random
from pathlib import Path

from bench.routing.workloads import TRACE_FILE

KEPT_SHARE = 1 / 50
SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    lines = parser.parse_args().file.read_text(encoding="utf-8").splitlines()
    conversations = [str(json.loads(line)["hash_ids"][1:2]) for line in lines]
    rng = random.Random(SEED)
    kept = {conversation for conversation in sorted(set(conversations)) if rng.random() < KEPT_SHARE}
    chosen = [line for line, conversation in zip(lines, conversations, strict=True) if conversation in kept]
    TRACE_FILE.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    print(f"{len(chosen)} of {len(lines)} requests written to {TRACE_FILE}")


if __name__ == "__main__":
    main()

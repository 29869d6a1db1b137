"""Tables of docs/ of what parts of kvmesh cost or take, from recorded results: `python -m tools.recorded_parts faults`.

`tools.recorded` has those of whole meshes. A part of a page names the command, and a test compares the two.
"""

import json
import sys
from statistics import median

from tools.docs_site import REPOSITORY
from tools.recorded import Facts, newest, short, table

RESULTS = REPOSITORY / "bench" / "results"
STARTS = {
    "interpreter": "interpreter",
    "command line": "command line",
    "picker's modules": "the picker's modules",
    "listening": "port open",
    "serving": "ready",
    "first pick": "first pick",
    "first pick, respawned": "first pick with `--respawn`, since the kill",
}
FAULTS = {
    "nothing": "none",
    "lost-messages": "one batch in five is lost",
    "lost-tail": "the last batches before a silence are lost",
    "lost-after-a-rest": "a batch after 6 s of silence is lost, and nothing follows",
    "replay-hangs": "the replay socket hangs, and there is a gap",
    "replay-refuses": "the replay socket refuses, and there is a gap",
    "replay-hangs-while-quiet": "the replay socket hangs, and there is no gap",
    "skipped-numbers": "a number is skipped every 2 s",
    "skipped-all-the-time": "every second number is skipped",
    "killed-indexer": "the indexer of the stream is killed",
    "frozen-indexer": "it is frozen for 4 s",
    "all-indexers-killed": "all indexers are killed",
    "slow-consumer": "the indexer stands still; the publisher drops what it cannot send",
    "backlog": "4,000 batches at once, three times",
    "restarted-pod": "the pod restarts, three times",
    "redis-restarts-empty": "Redis restarts empty",
    "redis-fails-over-to-a-replica-that-lags": "Redis falls back to what it was 1 s before",
    "lost-messages-without-replay": "no replay endpoint: batches are lost",
    "lost-tail-without-replay": "no replay endpoint: the last batches are lost",
}
ENDS = {"killed": "killed", "frozen": "frozen", "stopped": "stopped (SIGTERM)"}
APPLIED = {"new blocks": "new blocks", "steady state": "as many removed as stored"}
READ = {
    "PrefixIndexReader, held, seen before": "reader, held, seen before",
    "PrefixIndexReader, held, never seen": "reader, held, never seen",
    "PrefixIndexReader, cold": "reader, cold",
    "shared link, MGET": "MGET alone",
}
PICKERS = {
    "one picker": "one",
    "three pickers, one Redis": "three, one Redis",
    "three pickers, a Redis each": "three, a Redis each",
}


def recorded(name: str) -> Facts:
    """Return one result by its date and kind."""
    found: Facts = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def first_pick() -> str:
    """Return when a starting picker has come how far."""
    result = newest("first-pick")
    picks = {"first pick": "first_picks_ms", "first pick, respawned": "respawned_first_picks_ms"}
    rows = [["done", "ms since the start", "of which CPU"]]
    for name, says in STARTS.items():
        each = result["medians"][name]
        every = result[picks[name]] if name in picks else []
        spread = f" ({min(every):.0f}..{max(every):.0f})" if every else ""
        rows.append([says, f"{each['wall_ms']:.0f}{spread}", f"{each['cpu_ms']:.0f}"])
    return table(rows)


def days() -> str:
    """Return the judged figures of each recorded day."""
    rows = [["result", "CPU", "loop, ns", "picker CPU at 16", "at 1", "added p50 at 1"]]
    for path in sorted(RESULTS.glob("????-??-??-picker.json")):
        found = recorded(path.stem)
        cases = {(each["prompt_tokens"], each["concurrency"]): each for each in found["cases"]}
        busy, alone = cases[8000, 16], cases[8000, 1]
        rows.append(
            [
                f"[`{path.name}`](../../bench/results/{path.name})",
                found["machine"]["cpu"].replace("(R)", "").replace(" Processor @ ", ", "),
                f"{found['calibration']['loop_ns_per_iteration']['median']:.0f}",
                short(busy["picker_cpu_ms"]["median"]),
                short(alone["picker_cpu_ms"]["median"]),
                short(alone["added_by_picker"]["p50_ms"]["median"]),
            ]
        )
    return table(rows)


def faults() -> str:
    """Return for how long blocks were claimed falsely, and not believed, by fault."""
    result = newest("faults")
    rows = [["fault", "`--only`", "false s", "unused s"]]
    for name, says in FAULTS.items():
        each = result[name]
        rows.append([says, f"`{name}`", f"{each['false_seconds']:.2f}", f"{each['unused_seconds']:.2f}"])
    return table(rows)


def takeovers() -> str:
    """Return after how long another indexer owns a stream, and applies its batches."""
    rounds = newest("takeover")["rounds"]
    rows = [["the indexer is", "another one owns its streams after", "and applies their batches after"]]
    for name, says in ENDS.items():
        cells = [[each[part] for each in rounds[name]] for part in ("owner_seconds", "applied_seconds")]
        rows.append([says, *(f"{median(cell):.2f} s ({max(cell):.2f} at worst)" for cell in cells)])
    return table(rows)


def gpu_fits() -> str:
    """Return the lines that were fitted to the steps of a GPU."""
    result = newest("gpu-steps")
    rows = [["a step with", "fit, ms", "mean error", "largest"]]
    base, sequence, token = result["decode_fit"]["coefficients_ms"]
    decode = f"{base:.2f} + {sequence:.4f} a sequence + {1e3 * token:.3f} a 1,000 tokens in their caches"
    start, chunk, pair = result["prompt_fit"]["coefficients_ms"]
    prompt = f"{start:.2f} + {1e3 * chunk:.1f} a 1,000 tokens"
    prompt += f" + {1e6 * pair:.1f} a million pairs of a token and one before it"
    for says, fit, kind in (
        ("sequences that decode", decode, "decode_fit"),
        ("one prompt's chunk", prompt, "prompt_fit"),
    ):
        errors = [f"{100 * result[kind][name]:.0f} %" for name in ("mean_error", "largest_error")]
        rows.append([says, fit, *errors])
    return table(rows)


def hybrid_stores() -> str:
    """Return what storing a hybrid model's blocks costs."""
    return _hybrid(
        ("bytes of Redis a block of full attention", "bytes_a_block", 0),
        ("applying, µs of the indexer's CPU a batch", "indexer_us_a_batch", 0),
        ("the same, a block of full attention", "indexer_us_a_block", 1),
        ("applying, µs of Redis' CPU a batch", "redis_us_a_batch", 0),
        ("the same, a block of full attention", "redis_us_a_block", 1),
    )


def hybrid_lookups() -> str:
    """Return what looking a prompt of a hybrid model up costs the picker."""
    return _hybrid(
        ("asked of Redis, 4 pods hold it", "asked_picker_us_4_hold_it", 0),
        ("asked of Redis, 16 pods hold it", "asked_picker_us_16_hold_it", 0),
        ("known by [tracking](../decisions/0006-tracked-blocks.md), 4 pods hold it", "known_picker_us_4_hold_it", 0),
        ("known by tracking, 16 pods hold it", "known_picker_us_16_hold_it", 0),
    )


def _hybrid(*lines: tuple[str, str, int]) -> str:
    layouts = newest("hybrid-index")["layouts"]
    rows = [["", "one group", "window that keeps all", "window that keeps 4 of 32"]]
    for says, name, digits in lines:
        rows.append([says, *(f"{each[name]:.{digits}f}" for each in layouts)])
    return table(rows)


def prefill_leg() -> str:
    """Return what a prefill leg costs the picker."""
    rows = [["prompt tokens", "picker CPU with a leg, ms", "without"]]
    for each in newest("prefill-leg")["sizes"]:
        rows.append([f"{each['tokens']:,}", f"{each['leg_cpu_ms']:.1f}", f"{each['none_cpu_ms']:.1f}"])
    return table(rows)


def replicas() -> str:
    """Return how evenly one and three pickers balance."""
    default, own = (run["replicas"] for run in recorded("2026-11-21-replicas")["runs"])
    head = ["pickers", "default policy: fullest / mean", "of one"]
    rows = [[*head, "`least-request`, pods report once: fullest / mean", "of one"]]
    for name, says in PICKERS.items():
        row = [says]
        for runs in (default, own):
            fullest = {each: 1 + sum(one["imbalance"] for one in runs[each]) / len(runs[each]) for each in runs}
            row += [f"{fullest[name]:.3f}", f"{fullest[name] / fullest['one picker']:.3f}"]
        rows.append(row)
    return table(rows)


def growth() -> str:
    """Return what a block takes as the index grows."""
    rows = [["blocks in the index", "bytes a (source, block)", "Redis µs a block", "indexer µs a block"]]
    for each in recorded("2026-11-21-index")["growth_busy"]:
        costs = [f"{each[name]:.1f}" for name in ("bytes_a_block", "redis_us_a_block", "indexer_us_a_block")]
        rows.append([f"{round(each['blocks_held'], -5):,}", *costs])
    return table(rows)


def applying() -> str:
    """Return what applying costs, by batches a change."""
    result = recorded("2026-11-21-index")
    before = [each | {"way": "before this schema, new blocks"} for each in result["apply_before_schema_2_same_minutes"]]
    rows = [["what", "batches a change", "blocks/s", "indexer µs a block", "Redis µs a block", "bytes"]]
    for each in (*result["apply"]["rows"], *before):
        rows.append(
            [
                APPLIED.get(each["way"], each["way"]),
                str(each["batches_a_change"]),
                f"{round(each['blocks_a_second'], -3):,}",
                f"{each['indexer_us_a_block']:.1f}",
                f"{each['redis_us_a_block']:.1f}",
                f"{each['bytes_a_block']:.0f}",
            ]
        )
    return table(rows)


def visible() -> str:
    """Return how long a batch takes from being published to being visible."""
    names = ("p50_ms", "p95_ms", "p99_ms", "max_ms")
    head = ["blocks/s", "p50 ms", "p95 ms", "p99 ms", "max ms", "indexer, cores"]
    rows = [[*head, "indexer, µs of CPU a batch"]]
    for each in sorted(recorded("2026-11-21-index")["visible"]["rows"], key=lambda row: float(row["blocks_a_second"])):
        times = [f"{each[name]:.0f}" if each[name] >= 10 else f"{each[name]:.1f}" for name in names]
        batch = f"{round(each['indexer_us_a_batch'], -1):,}"
        rows.append([f"{round(each['blocks_a_second'], -2):,}", *times, f"{each['indexer_cores']:.2f}", batch])
    return table(rows)


def lookups() -> str:
    """Return what a lookup takes, by what the reader knows."""
    small, large = ({each["way"]: each for each in size["ways"]} for size in recorded("2026-11-21-index")["lookup"])
    head = ["way", "64 blocks: p50 / p99", "512 blocks: p50 / p99", "512: client CPU"]
    rows = [[*head, "512: Redis CPU"]]
    for name, says in READ.items():
        times = [f"{each[name]['p50_ms']:.2f} / {each[name]['p99_ms']:.2f}" for each in (small, large)]
        rows.append([says, *times, *(f"{large[name][cpu]:.2f}" for cpu in ("client_cpu_ms", "redis_cpu_ms"))])
    return table(rows)


TABLES = {
    each.__name__: each
    for each in (
        *(first_pick, days, faults, takeovers, gpu_fits, hybrid_stores, hybrid_lookups, prefill_leg, replicas),
        *(growth, applying, visible, lookups),
    )
}

if __name__ == "__main__":
    sys.stdout.write(TABLES[sys.argv[1]]())

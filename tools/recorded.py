"""Tables of docs/ from the newest results in bench/results: `python -m tools.recorded picker` prints one.

Other pages quote the same figures in sentences; `tests/unit/docs/test_figures.py` holds them to the same results.
"""

import json
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from operate.load.summary import LoadReport, shown
from tools.docs_site import REPOSITORY

Facts = Mapping[str, Any]
ROUTERS = {
    "round-robin": "round robin",
    "least-request": "least request",
    "kvmesh": "kvmesh",
    "kvmesh:prefix-aware": "`prefix-aware`",
    "kvmesh:latency-cost": "`latency-cost`",
    "vllm-router": "vllm-router",
    "smg": "smg",
}
WORKLOADS = ("qa", "qa-x2", "trace", "burst", "uniform", "churn")
OVERLOADS = {
    "kvmesh 0.5x": ("kvmesh", 0.5),
    "1x": ("kvmesh", 1.0),
    "2x": ("kvmesh", 2.0),
    "3x": ("kvmesh", 3.0),
    "off 3x": ("kvmesh:off", 3.0),
    "Envoy least-request 3x": ("least-request", 3.0),
}


def newest(kind: str, *, arm: str | None = None) -> Facts:
    """Return the newest result of a benchmark (picker, watched, routing, overload), of those that measured this arm."""
    for path in sorted(REPOSITORY.glob(f"bench/results/????-??-??-{kind}.json"), reverse=True):
        found = _read(path)
        if arm is None or arm in found["arms"]:
            return found
    raise FileNotFoundError(f"bench/results has no result of {kind} with the arm {arm}")


def _read(path: Path) -> Facts:
    found: Facts = json.loads(path.read_text(encoding="utf-8"))
    return found


def case(tokens: int, concurrency: int) -> Facts:
    """Return what the picker cost at one prompt size and concurrency."""
    return next(
        each
        for each in newest("picker")["cases"]
        if (each["prompt_tokens"], each["concurrency"]) == (tokens, concurrency)
    )


def short(value: float) -> str:
    """Write a figure with the three digits that the noise leaves."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.0f}"


def spread(value: Mapping[str, float]) -> str:
    """Write median (least..greatest)."""
    return f"{short(value['median'])} ({short(value['min'])}..{short(value['max'])})"


def picker() -> str:
    """Return CPU and added latency by prompt size and concurrency."""
    head = ["tokens", "at once", "picker CPU", "bare gRPC exchange", "picking itself"]
    rows = [[*head, "picker adds to p50", "bare adds to p50"]]
    for each in newest("picker")["cases"]:
        cells = [each["picker_cpu_ms"], each["bare_exchange_cpu_ms"], each["picking_cpu_ms"]]
        cells += [each["added_by_picker"]["p50_ms"], each["added_by_bare_exchange"]["p50_ms"]]
        rows.append([f"{each['prompt_tokens']:,}", str(each["concurrency"]), *map(spread, cells)])
    return table(rows)


def budgets() -> str:
    """Return the promises that a run judges."""
    rows = [["budget", "measured, ms", ""]]
    for each in newest("picker")["verdicts"]:
        budget = f"{each['promise']}: at most {each['budget_ms']:g} ms"
        rows.append([budget, spread(each["measured_ms"]), "met" if each["met"] else "missed"])
    return table(rows)


def routing() -> str:
    """Return mean / p95 TTFT, and the hit rate as a share of one cache's, by workload and router."""
    return _routing(newest("routing"))


def peers() -> str:
    """Return the same of the newest run beside other routers."""
    return _routing(newest("routing", arm="vllm-router"))


def radix_tree() -> str:
    """Return what the index costs beside Dynamo's, of the newest run that compared them."""
    results = sorted(REPOSITORY.glob("bench/results/????-??-??-index.json"), reverse=True)
    compared = next(found["compare"] for found in map(_read, results) if "compare" in found)
    ours, theirs = compared["kvmesh"], compared["RadixTree"]
    store = f"{ours['store_redis_us_a_block']:.1f} of Redis + {ours['store_indexer_us_a_block']:.1f} of the indexer"
    lookups = (f"{each['lookup_p50_ms']:.2f} / {each['lookup_p99_ms']:.2f}" for each in (ours, theirs))
    return table(
        [
            ["", "kvmesh's index in Redis", f"`RadixTree` of ai-dynamo-runtime {theirs['version']}"],
            ["store, µs of CPU a block", store, f"{theirs['store_us_a_block']:.1f}"],
            ["lookup of 512 blocks, p50 / p99, ms", *lookups],
            ["bytes a block of one pod", *(f"{each['bytes_a_block']:.0f}" for each in (ours, theirs))],
        ]
    )


def _routing(result: Facts) -> str:
    runs = {(each["arm"], each["workload"]): each for each in result["runs"]}
    arms = [arm for arm in ROUTERS if arm in result["arms"]]
    rows = [["", *(ROUTERS[arm] for arm in arms)]]
    for workload in WORKLOADS:
        rows.append([f"`{workload}`", *(_ttft(runs[arm, workload]) for arm in arms)])
    shares = (f"{runs[arm, 'churn']['success_rate']:.1%}".replace("%", " %") for arm in arms)
    rows.append(["`churn`, answered", *shares])
    return table(rows)


def _ttft(run: Facts) -> str:
    latency = f"{run['ttft_mean']:.0f} / {run['ttft_p95']:.0f}"
    share = run["hit_share"] if run["workload"] != "uniform" else None
    return latency if share is None else f"{latency}, {share:.2f}"


def overload() -> str:
    """Return what critical requests meet, and the goodput, by load and arm."""
    result = newest("overload")
    runs = {(each["arm"], each["load"]): each for each in result["runs"] if each["scenario"] == "steady"}
    chosen = [runs[key] for key in OVERLOADS.values()]
    critical = [run["classes"][0] for run in chosen]
    capacity = result["plan"]["capacity"]
    rows = [["", *OVERLOADS]]
    times = [f"{each['ttft_p50']:,.0f} / {each['ttft_p99']:,.0f}" for each in critical]
    rows.append(["critical TTFT p50 / p99, ms", *times])
    rows.append(["critical answered", *(f"{100 * each['answered'] / each['requests']:.0f} %" for each in critical)])
    rows.append(["goodput, share of capacity", *(f"{100 * run['goodput'] / capacity:.0f} %" for run in chosen)])
    return table(rows)


def promise() -> str:
    """Return what is kept of a promised inter-token time, and the share of least request's work, by load and arm."""
    head = [
        "",
        "token gap p50 / p95, ms",
        "promised",
        "TTFT p95, ms",
        "answered",
        "prompt tokens/s",
        "of least request's",
    ]
    rows = [head]
    for each in _newest_promise():
        share = each["throughput_share"]
        rows.append(
            [
                f"`{each['arm']}` {each['load']:g}x",
                f"{each['inter_token_p50']:.1f} / {each['inter_token_p95']:.1f}",
                f"{each['promised_ms']:g}",
                f"{each['ttft_p95']:,.0f}",
                f"{100 * each['answered_share']:.0f} %",
                f"{each['throughput']:,.0f}",
                f"{100 * share:.0f} %" if share is not None else "",
            ]
        )
    return table(rows)


def _newest_promise() -> list[Facts]:
    """Return the rows of the newest run with that part, by itself or behind the others."""
    for path in sorted(REPOSITORY.glob("bench/results/*-overload*.json"), reverse=True):
        rows: list[Facts] = json.loads(path.read_text(encoding="utf-8")).get("promise", {}).get("rows", [])
        if rows:
            return rows
    raise FileNotFoundError("bench/results has no result of overload with a promised inter-token time")


def conserved() -> str:
    """Return what order costs in throughput, by mix."""
    head = ["mix", "interactive TTFT p95, ms", "aimed at", "least request", "of least request's throughput"]
    rows = [[*head, "refused at 0.9 times the capacity"]]
    for each in newest("conserved")["rows"]:
        rows.append(
            [
                each["says"],
                f"{each['interactive_p95']:,.0f}",
                f"{each['interactive_aim']:,.0f}",
                f"{each['least_request_p95']:,.0f}",
                f"{100 * each['share']:.1f} % ({100 * min(each['shares']):.1f} at least)",
                f"{each['refusals']} of {each['requests']:,}",
            ]
        )
    return table(rows)


def disaggregation() -> str:
    """Return goodput, mean TTFT and the 99th percentile of gaps between tokens: a line for each mix and fleet."""
    result = newest("disaggregation")
    pods, rules = result["plan"]["pods"], ("never", "always", "thresholds", "estimate")
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for each in result["runs"]:
        cell = f"{100 * each['goodput']:.1f} %; {each['ttft_mean']:,.0f}; {each['inter_token_p99']:.0f}"
        lines.setdefault((each["mix"], each["prefill_pods"]), {})[each["arm"]] = cell
    rows = [["mix", "pods", "`both`", *(f"`{rule}`" for rule in rules)]]
    for (mix, prefill), cells in lines.items():
        fleet = f"{prefill}:{pods - prefill}" if prefill else str(pods)
        rows.append([mix, fleet, *(cells.get(rule, "") for rule in ("both", *rules))])
    return table(rows)


def scaling() -> str:
    """Return what each autoscaler keeps and costs, by load."""
    head = ["load", "autoscaler", "in time", "pod hours", "of the oracle's"]
    rows = [[*head, "of one that keeps as many", "changes", "seeds"]]
    for each in newest("scaling")["rows"]:
        equal, (low, high) = each["of_equal_oracle"], each["of_oracle_range"]
        setting = "" if each["arm"] == "kvmesh" else f" {', '.join(f'{setting:g}' for setting in each['settings'])}"
        rows.append(
            [
                f"{each['mix']}, {each['shape']}",
                f"`{each['arm']}`{setting}",
                f"{100 * each['attainment']:.1f} %",
                f"{each['pod_hours']:.1f}",
                f"{each['of_oracle']:.2f}" + (f" ({low:.2f}–{high:.2f})" if each["seeds"] > 1 else ""),
                "" if equal is None else f"{equal:.2f}",
                f"{each['changes']:.0f}",
                str(each["seeds"]),
            ]
        )
    return table(rows)


def scaling_processes() -> str:
    """Return what the signal keeps and costs on real processes, and in virtual time on the same requests."""
    result = newest("scaling-processes")
    oracle = result["oracle"]
    rows = [["autoscaler", "where", "in time", "pod seconds", "of the oracle's"]]
    for who, where, each in (
        ("`kvmesh`", "real processes", result["outcome"]),
        ("`kvmesh`", "virtual time", result["virtual"]),
        (f"`oracle` {oracle['utilisation']:g}", "virtual time", oracle | {"of_oracle": 1.0}),
    ):
        kept, of_oracle = f"{100 * each['attainment']:.1f} %", f"{each['of_oracle']:.2f}"
        rows.append([who, where, kept, f"{each['pod_seconds']:,.0f}", of_oracle])
    return table(rows)


def gpu_steps() -> str:
    """Return how long a decode step takes on a GPU, by sequences and the length of their contexts."""
    result = newest("gpu-steps")
    base, each_sequence, each_token = result["decode_fit"]["coefficients_ms"]
    times = {(each["sequences"], each["context"]): each["ms"] for each in result["decode"]}
    sequences = sorted({key[0] for key in times})
    rows = [["tokens of context each", *(f"{count} sequences" for count in sequences)]]
    for context in sorted({key[1] for key in times}):
        cells = [
            f"{times[count, context]:.1f} ({base + count * each_sequence + count * context * each_token:.1f})"
            if (count, context) in times
            else ""
            for count in sequences
        ]
        rows.append([f"{context:,}", *cells])
    return table(rows)


def folders() -> str:
    """Return what was compared with vLLM for each real model's folder, and the result."""
    rows = [
        ["model", "type", "class in the folder", "texts", "chats", "refused by vLLM", "unequal", "unequal as written"]
    ]
    for each in newest("folders")["folders"]:
        names = [f"`{each[name]}`" for name in ("name", "model_type", "tokenizer_class")]
        counts = [each[name] for name in ("texts", "chats", "refused", "different", "different_as_written")]
        rows.append([*names, *(f"{count:,}" for count in counts)])
    return table(rows)


def libraries() -> str:
    """Return what was compared with vLLM where another library than transformers reads or renders."""
    head = ["folder", "library", "texts", "chats", "refused by vLLM", "left to the pods", "unequal"]
    rows = [[*head, "new chat, µs a token", "seen before", "loading, s of CPU"]]
    for each in newest("libraries")["folders"]:
        counts = [each[name] for name in ("texts", "chats", "refused", "left", "different")]
        costs = [_microseconds(each[name]) for name in ("new_us", "again_us")]
        cells = [f"`{each['name']}`", each["library"], *(f"{count:,}" for count in counts), *costs]
        rows.append([*cells, f"{each['load_cpu_s']:.1f}"])
    return table(rows)


def tokenizing() -> str:
    """Return what a token costs, model by model."""
    rows = [["model", "library", "new text", "seen before", "`tokenizers`, new text", "loading, s of CPU"]]
    for each in newest("tokenizing")["models"]:
        costs = [_microseconds(each[name]) for name in ("new_us", "again_us", "tokenizers_us")]
        rows.append([f"`{each['model']}`", f"`{each['engine']}`", *costs, f"{each['load_cpu_s']:.1f}"])
    return table(rows)


def token_ways() -> str:
    """Return what a prompt's tokens cost the picker and the request, by model, way and size."""
    ways = {"folder": "folder", "tokenize": "`/tokenize`", "render": "`/render`"}
    shown = ("llama3_1", "gemma3", "gpt4o")  # typical, expensive, and on the slow library
    results = [each for each in newest("token-ways")["models"] if each["model"] in shown]
    sizes = (f"{size:,} tokens" for size in (100, 1000, 8000))
    rows = [["model", "way", *sizes]]
    for each in results:
        for way, words in ways.items():
            cells = [
                f"{one['new_cpu_ms']:.2f} / {one['new_ms']:.2f}; {one['again_cpu_ms']:.2f} / {one['again_ms']:.2f}"
                for one in each["ways"][way]
            ]
            rows.append([f"`{each['model']}`", words, *cells])
    return table(rows)


def demo_load() -> str:
    """What `kvmesh load --beside round-robin` says at the demo."""
    return _as_said("demo-load")


def demo_chaos() -> str:
    """What `kvmesh load` says while pods of the demo are killed."""
    return _as_said("demo-chaos")


def _as_said(kind: str) -> str:
    console = Console(file=StringIO(), width=110, highlight=False)
    console.print(shown(msgspec.convert(newest(kind), LoadReport)))
    assert isinstance(console.file, StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(["```", *lines, "```", ""])


def _microseconds(value: Mapping[str, float]) -> str:
    return f"{value['median']:.3f} ({value['min']:.3f}..{value['max']:.3f})"


def table(rows: list[list[str]]) -> str:
    """Write a table, its head first."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


TABLES = {
    each.__name__: each
    for each in (
        *(
            picker,
            budgets,
            routing,
            peers,
            radix_tree,
            overload,
            promise,
            conserved,
            disaggregation,
            scaling,
            scaling_processes,
            gpu_steps,
            folders,
            libraries,
            tokenizing,
            token_ways,
            demo_load,
            demo_chaos,
        ),
    )
}

if __name__ == "__main__":
    sys.stdout.write(TABLES[sys.argv[1]]())

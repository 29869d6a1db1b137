"""Tables of docs/ from the newest results in bench/results: `python -m tools.recorded picker` prints one.

Other pages quote the same figures in sentences; `tests/unit/docs/test_figures.py` holds them to the same results.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

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
    for path in sorted(REPOSITORY.glob(f"bench/results/*-{kind}.json"), reverse=True):
        found: Facts = json.loads(path.read_text(encoding="utf-8"))
        if arm is None or arm in found["arms"]:
            return found
    raise FileNotFoundError(f"bench/results has no result of {kind} with the arm {arm}")


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
    return _table(rows)


def budgets() -> str:
    """Return the promises that a run judges."""
    rows = [["budget", "measured, ms", ""]]
    for each in newest("picker")["verdicts"]:
        budget = f"{each['promise']}: at most {each['budget_ms']:g} ms"
        rows.append([budget, spread(each["measured_ms"]), "met" if each["met"] else "missed"])
    return _table(rows)


def routing() -> str:
    """Return mean / p95 TTFT, and the hit rate as a share of one cache's, by workload and router."""
    return _routing(newest("routing"))


def peers() -> str:
    """Return the same of the newest run beside other routers."""
    return _routing(newest("routing", arm="vllm-router"))


def _routing(result: Facts) -> str:
    runs = {(each["arm"], each["workload"]): each for each in result["runs"]}
    arms = [arm for arm in ROUTERS if arm in result["arms"]]
    rows = [["", *(ROUTERS[arm] for arm in arms)]]
    for workload in WORKLOADS:
        rows.append([f"`{workload}`", *(_ttft(runs[arm, workload]) for arm in arms)])
    shares = (f"{runs[arm, 'churn']['success_rate']:.1%}".replace("%", " %") for arm in arms)
    rows.append(["`churn`, answered", *shares])
    return _table(rows)


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
    return _table(rows)


def disaggregation() -> str:
    """Return what clients get and what pods do, by mix, fleet and rule."""
    result = newest("disaggregation")
    pods = result["plan"]["pods"]
    head = [
        "mix",
        "pods",
        "rule",
        "goodput",
        "TTFT mean / p95, ms",
        "inter-token p50 / p95 / p99, ms",
        "output tokens/s",
    ]
    rows = [[*head, "remote", "prefill pods idle"]]
    for each in result["runs"]:
        prefill = each["prefill_pods"]
        gaps = " / ".join(f"{each[f'inter_token_{share}']:.0f}" for share in ("p50", "p95", "p99"))
        rows.append(
            [
                each["mix"],
                f"{prefill}:{pods - prefill}" if prefill else str(pods),
                f"`{each['arm']}`",
                f"{100 * each['goodput']:.1f} %",
                f"{each['ttft_mean']:,.0f} / {each['ttft_p95']:,.0f}",
                gaps,
                f"{each['tokens_per_second']:,.0f}",
                f"{100 * each['remote']:.0f} %" if prefill else "",
                f"{100 * each['prefill_idle']:.0f} %" if prefill else "",
            ]
        )
    return _table(rows)


def scaling() -> str:
    """Return what each autoscaler keeps and costs, by load."""
    head = ["load", "who", "promises kept", "TTFT", "inter-token", "pod hours", "of the oracle's"]
    rows = [[*head, "of one that keeps as many", "most pods", "changes", "seeds"]]
    for each in newest("scaling")["rows"]:
        equal, (low, high) = each["of_equal_oracle"], each["of_oracle_range"]
        setting = "" if each["arm"] == "kvmesh" else f" {', '.join(f'{setting:g}' for setting in each['settings'])}"
        rows.append(
            [
                f"{each['mix']}, {each['shape']}",
                f"`{each['arm']}`{setting}",
                *(
                    f"{100 * each[share]:.1f} %"
                    for share in ("attainment", "ttft_attainment", "inter_token_attainment")
                ),
                f"{each['pod_hours']:.1f}",
                f"{each['of_oracle']:.2f}" + (f" ({low:.2f}–{high:.2f})" if each["seeds"] > 1 else ""),
                "" if equal is None else f"{equal:.2f}",
                str(each["most_pods"]),
                f"{each['changes']:.0f}",
                str(each["seeds"]),
            ]
        )
    return _table(rows)


def folders() -> str:
    """Return what was compared with vLLM for each real model's folder, and the result."""
    rows = [
        ["model", "type", "class in the folder", "texts", "chats", "refused by vLLM", "unequal", "unequal as written"]
    ]
    for each in newest("folders")["folders"]:
        names = [f"`{each[name]}`" for name in ("name", "model_type", "tokenizer_class")]
        counts = [each[name] for name in ("texts", "chats", "refused", "different", "different_as_written")]
        rows.append([*names, *(f"{count:,}" for count in counts)])
    return _table(rows)


def libraries() -> str:
    """Return what was compared with vLLM where another library than transformers reads or renders."""
    head = ["folder", "library", "texts", "chats", "refused by vLLM", "left to the pods", "unequal"]
    rows = [[*head, "new chat, µs a token", "seen before", "loading, s of CPU"]]
    for each in newest("libraries")["folders"]:
        counts = [each[name] for name in ("texts", "chats", "refused", "left", "different")]
        costs = [_microseconds(each[name]) for name in ("new_us", "again_us")]
        cells = [f"`{each['name']}`", each["library"], *(f"{count:,}" for count in counts), *costs]
        rows.append([*cells, f"{each['load_cpu_s']:.1f}"])
    return _table(rows)


def tokenizing() -> str:
    """Return what a token costs, model by model."""
    rows = [["model", "library", "new text", "seen before", "`tokenizers`, new text", "loading, s of CPU"]]
    for each in newest("tokenizing")["models"]:
        costs = [_microseconds(each[name]) for name in ("new_us", "again_us", "tokenizers_us")]
        rows.append([f"`{each['model']}`", f"`{each['engine']}`", *costs, f"{each['load_cpu_s']:.1f}"])
    return _table(rows)


def token_ways() -> str:
    """Return what a prompt's tokens cost the picker and the request, by model, way and size."""
    ways = {"folder": "folder", "tokenize": "`/tokenize`", "render": "`/render`"}
    results = newest("token-ways")["models"]
    sizes = (f"{size:,} tokens" for size in (100, 1000, 8000))
    rows = [["model", "way", *sizes]]
    for each in results:
        for way, words in ways.items():
            cells = [
                f"{one['new_cpu_ms']:.2f} / {one['new_ms']:.2f}; {one['again_cpu_ms']:.2f} / {one['again_ms']:.2f}"
                for one in each["ways"][way]
            ]
            rows.append([f"`{each['model']}`", words, *cells])
    return _table(rows)


def _microseconds(value: Mapping[str, float]) -> str:
    return f"{value['median']:.3f} ({value['min']:.3f}..{value['max']:.3f})"


def _table(rows: list[list[str]]) -> str:
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
            overload,
            disaggregation,
            scaling,
            folders,
            libraries,
            tokenizing,
            token_ways,
        ),
    )
}

if __name__ == "__main__":
    sys.stdout.write(TABLES[sys.argv[1]]())

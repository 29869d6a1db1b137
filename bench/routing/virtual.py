"""The same workloads in virtual time: minutes of load in seconds of CPU, for trying policies.

    python -m bench.routing.virtual [--workloads W] [--seeds N] [--try NAME=JSON]...

The simulated pods' own scheduler and the picker's own decision, driven by a queue of events: no processes, no sockets,
no noise, the same result each time. It leaves out what takes time besides the pods (Envoy, the picker, events on their
way), so `run` has the last word. JSON is a policy as for `kvmesh extproc --policy`.
"""

import argparse
import json
import math
import statistics
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table

from bench.prompts import vocabulary_words
from bench.routing.one_cache import one_cache
from bench.routing.plan import STANDARD, PodSettings
from bench.routing.script import Workload
from bench.routing.summary import RunSummary, summarise
from bench.routing.virtual_picker import Picker
from bench.routing.virtual_world import Pod, RoundRobin, Router, World
from bench.routing.workloads import WORKLOADS, Texts, build
from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy
from extproc.policy.values import PickPolicy
from podsim.model_folder import TINY_MODEL, ModelFolder, load_model_folder


def play(
    workload: Workload, policy: PickPolicy | None, *, name: str, settings: PodSettings, folder: ModelFolder, seed: int
) -> RunSummary:
    """One run; without a policy it is round robin."""
    pods = [Pod(f"10.0.0.{number + 1}:8000", settings) for number in range(settings.pods)]
    routers: list[Router]
    if policy is None:
        routers = [RoundRobin(pods)]
    else:
        pickers = [Picker(pods, policy, seed=seed + number) for number in range(workload.routers)]
        for picker in pickers:
            picker.others = [other for other in pickers if other is not picker]
        routers = list(pickers)
    world = World(workload, pods, routers, folder, Texts(vocabulary_words(TINY_MODEL), seed=f"{seed} answers"))
    world.run()
    return summarise(
        arm=name,
        workload=workload.name,
        records=world.records,
        measured_from=workload.measured_from,
        ttft_limit_ms=STANDARD.ttft_limit_ms,
        one_cache=one_cache(workload.sessions, world.records, folder=folder, measured_from=workload.measured_from),
        pods=[pod.counts() for pod in pods],
        busy_cores=0.0,
        cpu_ms={},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=3, help="loads of each workload (default: 3)")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="NAME=JSON", help="a policy")
    options = parser.parse_args()
    policies: dict[str, PickPolicy | None] = {"round-robin": None, "kvmesh": PickPolicy()}
    for text in options.tries:
        name, _, document = text.partition("=")
        policies[name], _ = pick_policy(read_policy_file(json.loads(document)))
    folder, words = load_model_folder(TINY_MODEL), vocabulary_words(TINY_MODEL)
    names = options.workloads.split(",")
    table = Table(title="mean / p95 TTFT ms, share of one unlimited cache", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("policy", *names, "geometric mean"):
        table.add_column(column, no_wrap=True)
    loads = [
        [build(name, replace(STANDARD, seed=STANDARD.seed + seed), words=words) for seed in range(options.seeds)]
        for name in names
    ]
    for name, policy in policies.items():
        cells, means = [], []
        for workloads in loads:
            runs = [
                play(load, policy, name=name, settings=STANDARD.pods, folder=folder, seed=number)
                for number, load in enumerate(workloads)
            ]
            mean, p95, share = (
                statistics.fmean(getattr(run, each) for run in runs) for each in ("ttft_mean", "ttft_p95", "hit_share")
            )
            cells.append(f"{mean:.0f} / {p95:.0f}, {share:.2f}")
            means.append(mean)
        table.add_row(name, *cells, f"{math.exp(statistics.fmean(math.log(mean) for mean in means)):.1f}")
    Console(width=60 + 22 * len(names)).print(table, highlight=False)


if __name__ == "__main__":
    main()

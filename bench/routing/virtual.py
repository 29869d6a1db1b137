"""The same workloads and wider ones in virtual time: minutes of load in seconds of CPU, for trying policies.

    python -m bench.routing.virtual [--mixes M] [--seeds A-B] [--try NAME=JSON]...

The simulated pods' own scheduler and the picker's own decision, driven by a queue of events: no processes, no sockets,
no noise, the same result each time. It leaves out what takes time besides the pods (Envoy, the picker, events on their
way), so `run` has the last word. JSON is a policy as for `kvmesh extproc --policy`.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table

from bench.prompts import vocabulary_words
from bench.routing.llm_d_guide import BLOCK_TOKENS, GuideSettings
from bench.routing.mixes import MIXES, mix
from bench.routing.one_cache import one_cache
from bench.routing.plan import STANDARD, PodSettings
from bench.routing.script import Workload
from bench.routing.summary import RunSummary, summarise
from bench.routing.virtual_guide import GuideRouter
from bench.routing.virtual_picker import Picker
from bench.routing.virtual_pod import Pod
from bench.routing.virtual_world import RoundRobin, Router, World
from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy
from extproc.policy.values import PickPolicy
from operate.load.workloads import Texts
from podsim.model_folder import TINY_MODEL, ModelFolder, load_model_folder

Routers = Callable[[Sequence[Pod], int, int], Sequence[Router]]
"""(pods, replicas, seed) -> what spreads the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One run."""

    summary: RunSummary
    regret_ms: float  # mean over the picks: the first token at the pod that was picked, less that at the best one


def round_robin(pods: Sequence[Pod], replicas: int, seed: int) -> Sequence[Router]:  # noqa: ARG001 - one is all
    """Each pod in turn."""
    return [RoundRobin(pods)]


def picker(policy: PickPolicy) -> Routers:
    """The picker with this policy."""

    def routers(pods: Sequence[Pod], replicas: int, seed: int) -> Sequence[Router]:
        pickers = [Picker(pods, policy, seed=seed + number) for number in range(replicas)]
        for each in pickers:
            each.others = [other for other in pickers if other is not each]
        return pickers

    return routers


def guide(most_penalty_seconds: float) -> Routers:
    """llm-d's guide, which knows the pods' speed."""

    def routers(pods: Sequence[Pod], replicas: int, seed: int) -> Sequence[Router]:
        engine = pods[0].engine
        settings = GuideSettings(
            most_penalty_seconds=most_penalty_seconds,
            peak_tokens_per_second=engine.prefill_tokens_per_second,
            cache_blocks=engine.capacity_tokens // BLOCK_TOKENS,
        )
        return [GuideRouter(len(pods), settings, seed=seed + number) for number in range(replicas)]

    return routers


# the guide as it comes, and with a penalty as much shorter as these loads are than real ones
ARMS: Mapping[str, Routers] = {
    "round-robin": round_robin,
    "llm-d-guide": guide(18.0),
    "llm-d-guide-1.8s": guide(1.8),
    "kvmesh": picker(PickPolicy()),
}


def play(
    workload: Workload, routers: Routers, *, name: str, settings: PodSettings, folder: ModelFolder, seed: int
) -> Played:
    """One run."""
    pods = [Pod(f"10.0.0.{number + 1}:8000", settings) for number in range(settings.pods)]
    world = World(
        workload,
        pods,
        routers(pods, workload.routers, seed),
        folder,
        Texts(vocabulary_words(TINY_MODEL), seed=f"{seed} answers"),
    )
    world.run()
    summary = summarise(
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
    return Played(summary=summary, regret_ms=1000 * statistics.fmean(world.regrets))


def main() -> None:
    """Parse the flags, play, print."""
    options = _options()
    arms = dict(ARMS)
    for text in options.tries:
        name, _, document = text.partition("=")
        arms[name] = picker(pick_policy(read_policy_file(json.loads(document)))[0])
    if options.arms:
        arms = {name: arms[name] for name in (*options.arms.split(","), *(set(arms) - set(ARMS)))}
    names = options.mixes.split(",")
    folder, words = load_model_folder(TINY_MODEL), vocabulary_words(TINY_MODEL)
    found: dict[str, dict[str, list[Played]]] = {arm: {name: [] for name in names} for arm in arms}
    for name in names:
        for seed in options.seeds:
            load = mix(name, replace(STANDARD, seed=seed), words=words)
            for arm, routers in arms.items():
                played = play(load.workload, routers, name=arm, settings=load.pods, folder=folder, seed=seed)
                found[arm][name].append(played)
    Console(width=200).print(_table(found), highlight=False)


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text} is no range of seeds such as 1-3")
    return range(int(first), int(last) + 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", default=",".join(MIXES), help="default: %(default)s")
    parser.add_argument(
        "--seeds", default="1-3", type=_seeds, metavar="A-B", help="one load of each mix for each (default: 1-3)"
    )
    parser.add_argument("--arms", default="", help=f"of {', '.join(ARMS)}; default: all of them")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="NAME=JSON", help="a policy")
    options = parser.parse_args()
    unknown = [name for name in options.mixes.split(",") if name not in MIXES]
    unknown += [name for name in options.arms.split(",") if name and name not in ARMS]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}")
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Of an arm's runs of one mix."""

    mean: float
    p50: float
    p95: float
    hit_share: float
    regret: float


def means(runs: Sequence[Played]) -> Means:
    """Over the seeds; times in milliseconds."""
    summaries = [run.summary for run in runs]
    return Means(
        mean=statistics.fmean(summary.ttft_mean for summary in summaries),
        p50=statistics.fmean(summary.ttft_p50 for summary in summaries),
        p95=statistics.fmean(summary.ttft_p95 for summary in summaries),
        hit_share=statistics.fmean(summary.hit_share for summary in summaries),
        regret=statistics.fmean(run.regret_ms for run in runs),
    )


def _table(found: Mapping[str, Mapping[str, Sequence[Played]]]) -> Table:
    """A line for each mix, a column for each arm; the last line has the geometric means."""
    table = Table(
        title="TTFT ms: mean / p50 / p95, share of one unlimited cache, regret of a pick in ms",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for column in ("mix", *found):
        table.add_column(column, no_wrap=True)
    by_arm = {arm: {name: means(runs) for name, runs in mixes.items()} for arm, mixes in found.items()}
    for name in next(iter(found.values())):
        table.add_row(name, *(_cell(by_mix[name]) for by_mix in by_arm.values()))
    table.add_row("geometric mean", *(_overall(list(by_mix.values())) for by_mix in by_arm.values()))
    return table


def _cell(it: Means) -> str:
    return f"{it.mean:.1f} / {it.p50:.0f} / {it.p95:.0f}, {it.hit_share:.2f}, {it.regret:.1f}"


def _overall(mixes: Sequence[Means]) -> str:
    columns = ([each.mean for each in mixes], [each.p50 for each in mixes], [each.p95 for each in mixes])
    return " / ".join(f"{math.exp(statistics.fmean(map(math.log, column))):.1f}" for column in columns)


if __name__ == "__main__":
    main()

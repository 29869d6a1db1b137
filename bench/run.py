"""What the picker costs: `python -m bench.run [--quick] [--out FILE] [--name NAME]`.

One real Envoy before simulated pods on loopback, with three routes that are measured in turn: with the picker, with a
bare picker that picks without looking, and without ext_proc. Chats of three sizes, nine tenths of each a known prefix.
Writes JSON and prints tables; docs/evidence/benchmarks.md says how to read them.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.cpu_time import machine_ticks
from bench.machine import machine, revision, versions
from bench.plan import QUICK, SIMULATOR, Plan
from bench.report import facts, verdicts
from bench.stage import measure
from bench.tables import WIDTH, tables
from operate.local.errors import UpError

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Parse the flags, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-<name>.json")
    parser.add_argument("--name", default="picker", help="part of the default file name (default: picker)")
    arguments = parser.parse_args()
    began = datetime.now(UTC)
    try:
        result = asyncio.run(whole_result(QUICK if arguments.quick else Plan(), date=began))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted: everything that was started has ended, nothing is written")
    except UpError as error:
        sys.exit("\n".join((error.message, *error.log_lines)))
    out = arguments.out or RESULTS / f"{began:%Y-%m-%d}-{arguments.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console = Console(width=min(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH)
    console.print(tables(result), highlight=False)
    console.print(f"written to {out}", highlight=False, soft_wrap=True)


async def whole_result(plan: Plan, *, date: datetime) -> dict[str, Any]:
    """The measurement and what must be known to judge it."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # as Ctrl-C: end the children first
    console = Console(stderr=True)
    load_before, ticks_before = os.getloadavg()[0], machine_ticks()
    measurement = await measure(plan, say=lambda line: console.print(f"{line} ...", highlight=False))
    (ticks, stolen), load_after = machine_ticks(), os.getloadavg()[0]
    measured = facts(measurement)
    return {
        "date": date.isoformat(timespec="seconds"),
        "machine": machine(),
        # whatever else ran on this machine is in every number
        "load_average": {"before": round(load_before, 2), "after": round(load_after, 2)},
        "stolen_cpu_percent": round(100 * (stolen - ticks_before[1]) / max(1, ticks - ticks_before[0]), 2),
        "versions": versions(),
        "kvmesh": revision(RESULTS.parent),
        "plan": asdict(plan),
        "simulator": dict(SIMULATOR),
        **measured,
        "verdicts": [asdict(verdict) for verdict in verdicts(measured["cases"])],
    }


if __name__ == "__main__":
    main()

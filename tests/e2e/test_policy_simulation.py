"""Record on a real mesh, then simulate: what `kvmesh policy simulate` says of a log is what had really happened.

And what it says of another policy is what happens when that policy is really in force, under the same load.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.e2e.stack import Stack, eventually, running_stack

OBJECTIVE, TENANT = "x-gateway-inference-objective", "x-gateway-inference-fairness-id"
PODS, REQUESTS, ALLOWED = 2, 48, 20
TODAY: dict[str, Any] = {
    "priorities": {
        "trustObjective": True,
        "classes": [{"name": "batch", "priority": -50, "sheddable": True, "ttftSeconds": 30, "queueSeconds": 60}],
    },
    "observability": {"sampleShare": 1},
}
# the bucket of the tenant has so many requests at once, and a further one in three seconds
TOMORROW = {**TODAY, "quotas": [{"tenant": "*", "requestsPerMinute": ALLOWED, "burstSeconds": 60}]}


async def send(stack: Stack) -> Counter[int]:
    """Send the load, streamed, faster than the pods are; return the statuses."""

    async def one(number: int) -> int:
        await asyncio.sleep(number * 0.03)
        headers = {OBJECTIVE: "batch" if number % 2 else "standard", TENANT: "acme"}
        prompt = [1 + (number + 1) * (place + 7) % 887 for place in range(600)]  # no two begin alike
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return (await stack.send("POST", "/v1/completions", headers=headers, json=body | streamed)).status

    return Counter(await asyncio.gather(*(one(number) for number in range(REQUESTS))))


async def record(folder: Path, policy: dict[str, Any]) -> tuple[Path, Counter[int]]:
    """Play the load under a policy; return the access log and the statuses that the clients got."""
    folder.mkdir()
    log = folder / "access.log"
    settings = {
        "policy": policy,
        "access_log_file": str(log),
        "prefill_tokens_per_second": 4000,
        "inter_token_ms": 10,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
    }

    async def lines() -> int:
        return len(log.read_bytes().splitlines()) if log.exists() else 0

    async with running_stack(folder, pods=PODS, settings=json.dumps(settings)) as stack:
        statuses = await send(stack)
        await eventually(lines, lambda count: count >= REQUESTS)
    return log, statuses


def simulated(folder: Path, log: Path, **policies: dict[str, Any]) -> dict[str, Any]:
    """Ask the command itself; the last policy is the one in question."""
    files = {name: folder / f"{name}.json" for name in policies}
    for name, policy in policies.items():
        files[name].write_text(json.dumps(policy), encoding="utf-8")
    flags = [part for pair in zip(("--beside", "--policy"), files.values(), strict=True) for part in map(str, pair)]
    pod = ("--pod", "running=8,step-tokens=512")
    command = [sys.executable, "-m", "extproc", "policy", "simulate", *flags, "--trace", str(log), *pod, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def whole(found: dict[str, Any], run: str) -> dict[str, Any]:
    """Return the sums over all classes of one run."""
    (groups,) = [each["groups"] for each in found["runs"] if each["run"] == run]
    (group,) = [each for each in groups if each["class"] == "*"]
    return dict(group)


async def test_what_is_simulated_of_a_log_is_what_happened_and_what_will_happen(tmp_path: Path) -> None:
    log, statuses = await record(tmp_path / "today", TODAY)
    found = await asyncio.to_thread(simulated, tmp_path, log, today=TODAY, tomorrow=TOMORROW)

    assert statuses == {200: REQUESTS}
    recorded, today, tomorrow = (whole(found, run) for run in ("recorded", "today", "tomorrow"))
    assert recorded["served"] == REQUESTS
    assert recorded["ttft_known"] > REQUESTS / 2  # those that were late before they were sent are not read
    assert (today["served"], today["refused"]) == (REQUESTS, {})
    assert found["pod"]["fitted_answers"] > REQUESTS / 2
    # the pods are busy for seconds: who came last waits longest, in both worlds
    assert recorded["waited"] > 5
    assert today["waited"] > 5
    assert 0.3 < today["ttft_p95_seconds"] / recorded["ttft_p95_seconds"] < 3

    really, answers = await record(tmp_path / "tomorrow", TOMORROW)
    refused = tomorrow["refused"]["quota-exceeded"]
    assert abs(refused - answers[429]) <= 1  # one more may come just in time
    assert REQUESTS - ALLOWED - 1 <= refused <= REQUESTS - ALLOWED
    turned_away = [line for line in map(json.loads, really.read_text().splitlines()) if line["fate"] == "refused"]
    assert {(line["reason"], line["prompt_tokens"]) for line in turned_away} == {("quota-exceeded", 600)}

"""A trace in a file -> its plan, with pods as they are declared or as a picker knows them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from extproc.errors import ConfigError, KvmeshError
from extproc.scaling.plan import Plan, PlannedRole
from extproc.scaling.trace import read_trace, trace_of
from extproc.scaling.trace_plan import Promises, TracePlan, plan_trace


def plan_file(
    file: Path,
    declared: Sequence[PlannedRole],
    ask: Callable[[], Sequence[Plan]],
    *,
    times: float,
    slot_seconds: float,
    ttft_seconds: float | None,
) -> TracePlan:
    """Plan for a file. Raise ConfigError for one that cannot be used, KvmeshError where no picker knows any pods."""
    try:
        with file.open("rb") as lines:
            requests = read_trace(lines, where=str(file))
    except OSError as error:
        raise ConfigError(f"--trace: cannot read {file}: {error.strerror or error}") from error
    known = Plan(of="declared", roles=tuple(declared)) if declared else _only(ask())
    promised = known.ttft_seconds if ttft_seconds is None else ttft_seconds
    return plan_trace(
        trace_of(requests, times=times, slot_seconds=slot_seconds),
        known.roles,
        promises=Promises(ttft_seconds=promised, inter_token_seconds=known.inter_token_seconds),
        pool=known.pool or str(file),
        currency=known.currency,
        slot_seconds=slot_seconds,
    )


def _only(plans: Sequence[Plan]) -> Plan:
    having = [plan for plan in plans if plan.roles]
    if not having:
        raise KvmeshError("no policy names a role in spec.autoscale, so that no picker knows the pods: give --pod")
    if len(having) > 1:
        names = ", ".join(plan.pool for plan in having)
        raise ConfigError(f"--pool: name one of the pools, whose pods are to serve the trace: {names}")
    return having[0]

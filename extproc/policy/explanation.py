"""The JSON of `kvmesh policy explain`: a pool's merged policy, with who says what and over whom. Pure.

Called by `mesh_policy`, for the admin page and for the command; `policy_view` shows it to people.
"""

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from extproc.policy.merge import Level, Loss, leaves_of
from extproc.policy.outcomes import Outcome, PoolLayer, written_path
from extproc.policy.pool_config import PoolConfig
from extproc.policy.status import ACCEPTED, PolicyStatus
from kvmesh.documents.documents import DocumentProblem

WORDS: Mapping[Level, str] = {
    Level.SETTINGS: "settings",
    Level.MESH: "mesh",
    Level.NAMESPACE: "namespace",
    Level.GATEWAY: "gateway",
    Level.ROUTE: "route",
    Level.POOL: "pool",
}
NAMESPACED = re.compile(r"[A-Za-z]+ ([^/ ]+)/[^/ ]+")  # "Kind namespace/name"


def explain_pool(
    config: PoolConfig, outcome: Outcome, statuses: Mapping[str, PolicyStatus], *, kind: str
) -> dict[str, Any]:
    """Return a pool's merged policy; policies in their order of precedence, the strongest last."""
    return {
        "pool": config.name,
        "kind": kind,
        "endpoints": len(config.endpoints),
        "ready_endpoints": sum(each.ready and not each.terminating for each in config.endpoints),
        "hosts": sorted(config.hosts),
        "policies": [_policy(each, statuses) for each in outcome.layers],
        "fields": sorted(_fields(outcome), key=lambda field: str(field["path"])),
        "not_in_force": [{"policy": fault.source, "because": fault.words} for fault in outcome.faults],
        "warnings": list(outcome.warnings),
    }


def explain_status(status: PolicyStatus, *, covers: Sequence[str]) -> dict[str, Any]:
    """Return one policy's line in the overview."""
    return {
        "policy": status.source,
        "generation": status.observed_generation,
        "covers": sorted(covers),
        "conditions": [condition.document() for condition in status.conditions],
    }


def explain_problems(
    problems: Iterable[DocumentProblem], *, namespaces: Container[str] | None = None
) -> list[dict[str, str]]:
    """Return what a person should mend, of these namespaces and of what has none (a file, a kind)."""
    return [
        {"reason": problem.reason, "where": problem.where, "words": problem.words}
        for problem in problems
        if namespaces is None or (space := NAMESPACED.fullmatch(problem.where)) is None or space[1] in namespaces
    ]


def _policy(each: PoolLayer, statuses: Mapping[str, PolicyStatus]) -> dict[str, Any]:
    status = statuses.get(each.layer.source)
    accepted = next((c for c in status.conditions if c.type == ACCEPTED), None) if status is not None else None
    return {
        "policy": each.layer.source,
        "level": WORDS[each.layer.level],
        "generation": each.generation,
        "created_at": each.layer.created_at,
        "accepted": accepted.status == "True" if accepted is not None else True,
        "message": accepted.message if accepted is not None else "",
    }


def _fields(outcome: Outcome) -> Iterator[dict[str, Any]]:
    levels = {each.layer.source: WORDS[each.layer.level] for each in outcome.layers}
    given = {each.layer.source: dict(leaves_of(each.layer.fields)) for each in outcome.layers}
    lost: defaultdict[str, list[Loss]] = defaultdict(list)
    for loss in outcome.merged.losses:
        lost[written_path(loss.path)].append(loss)

    def over(path: str) -> list[dict[str, Any]]:
        return [
            {"policy": loss.loser, "level": levels[loss.loser], "value": given[loss.loser][loss.path]}
            for loss in lost.pop(path, ())
        ]

    for path, value in leaves_of(outcome.merged.fields):
        source = outcome.merged.origins[path]
        written = written_path(path)
        yield _field(written, value, source, levels[source], over(written))
    for written, value in outcome.extended.items():
        yield _field(written, value, outcome.origins[written], "extension", [])
    for written in list(lost):  # taken away without another value, such as corrections of another strategy
        winner = lost[written][-1].winner
        yield _field(written, None, winner, levels[winner], over(written))


def _field(path: str, value: Any, policy: str, level: str, over: list[dict[str, Any]]) -> dict[str, Any]:
    return {"path": path, "value": value, "policy": policy, "level": level, "over": over}

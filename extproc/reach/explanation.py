"""The JSON of `kvmesh policy explain`: the pools of its TARGET, and a pool's merged policy with each field's origin.

Pure. A TARGET is `namespace/name`, `Kind/namespace/name` or `namespace`.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from extproc.errors import KvmeshError
from extproc.policy.inference_policy import KIND as POLICY
from extproc.policy.merge import Loss, leaves_of
from extproc.policy.model_tokens import ModelTokens, not_seen
from extproc.policy.profiles import with_profile
from extproc.policy.spec import GROUPS
from extproc.policy.values import PoolConfig
from extproc.reach.coverage import Reach
from extproc.reach.outcomes import Outcome, PoolLayer, written_path
from extproc.reach.status import ACCEPTED, PolicyStatus
from kvmesh.documents.documents import DocumentKey, DocumentProblem

NAMESPACED = re.compile(r"[A-Za-z]+ ([^/ ]+)/[^/ ]+")  # "Kind namespace/name"
# the names that kubectl accepts, in lower case
KINDS: Mapping[str, str] = {
    **{kind.lower(): kind for kind in (*GROUPS, POLICY)},
    **{f"{kind.lower()}s": kind for kind in (*GROUPS, POLICY) if not kind.endswith("y")},
    **{"gateways": "Gateway", "inferencepolicies": POLICY},
    **{"infpool": "InferencePool", "svc": "Service", "gtw": "Gateway", "infpol": POLICY},
}


class PolicyTargetError(KvmeshError):
    """Nothing of that name exists; the message names the nearest match."""


def targeted_pools(target: str, reach: Reach, covers: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names of the pools that a target leads to. Raise PolicyTargetError.

    `covers` maps policies to their pools, by "namespace/name". A pool's kind may be left out.
    """
    parts = target.strip("/").split("/")
    if len(parts) == 1:
        return _found(target, reach.by_namespace.get(target), "namespace with a pool", reach.by_namespace)
    if len(parts) == 2:
        name = "/".join(parts)
        return _found(target, [name] if name in reach.all_pools else None, "pool", reach.all_pools)
    if len(parts) != 3:
        raise PolicyTargetError(f"{target!r} is neither namespace/name, Kind/namespace/name nor a namespace")
    kind = KINDS.get(parts[0].lower())
    if kind is None:
        raise PolicyTargetError(f"{target!r}: the kind must be one of {', '.join((*GROUPS, POLICY))}")
    name = "/".join(parts[1:])
    if kind == POLICY:
        return _found(name, covers.get(name), kind, covers)
    reached = reach.by_target.get(DocumentKey(GROUPS[kind], kind, parts[1], parts[2]))
    return _found(name, reached, kind, (f"{key.namespace}/{key.name}" for key in reach.by_target if key.kind == kind))


def _found(name: str, pools: Iterable[str] | None, what: str, known: Iterable[str]) -> list[str]:
    if pools is not None:
        return sorted(pools)
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    raise PolicyTargetError(
        f"there is no {what} {name!r}" + (f"; the nearest is {close[0]!r}" if close else "; there is none at all")
    )


def explain_pool(
    config: PoolConfig,
    outcome: Outcome,
    statuses: Mapping[str, PolicyStatus],
    *,
    kind: str,
    tokens: Sequence[ModelTokens] | None = None,
) -> dict[str, Any]:
    """Return a pool's merged policy; its policies are in order of precedence, the strongest last.

    `tokens` are the token sources seen by the picker of the pool, or None if only the policies are known.
    """
    return {
        "pool": config.name,
        "kind": kind,
        "endpoints": len(config.endpoints),
        "ready_endpoints": sum(each.ready and not each.terminating for each in config.endpoints),
        "hosts": sorted(config.hosts),
        "policies": [_policy(each, statuses) for each in outcome.layers],
        "fields": sorted(_fields(outcome), key=lambda field: str(field["path"])),
        "not_in_force": [{"policy": fault.source, "because": fault.message} for fault in outcome.faults],
        "warnings": list(outcome.warnings),
        "tokens": [asdict(each) for each in (not_seen(config.models.served) if tokens is None else tokens)],
    }


def explain_status(status: PolicyStatus, *, covers: Sequence[str]) -> dict[str, Any]:
    """Return one policy's line in the overview."""
    return {
        "policy": status.source,
        "generation": status.observed_generation,
        "covers": sorted(covers),
        "conditions": list(msgspec.to_builtins(status.conditions)),
    }


def explain_problems(
    problems: Iterable[DocumentProblem], *, namespaces: Container[str] | None = None
) -> list[dict[str, str]]:
    """Return the problems to fix, in these namespaces or without a namespace (a file, a kind)."""
    return [
        {"reason": problem.reason, "where": problem.where, "words": problem.words}
        for problem in problems
        if namespaces is None or (space := NAMESPACED.fullmatch(problem.where)) is None or space[1] in namespaces
    ]


def _policy(each: PoolLayer, statuses: Mapping[str, PolicyStatus]) -> dict[str, Any]:
    status = statuses.get(each.source)
    accepted = next((c for c in status.conditions if c.type == ACCEPTED), None) if status is not None else None
    return {
        "policy": each.source,
        "level": each.layer.level.name.lower(),
        "generation": each.generation,
        "created_at": each.layer.created_at,
        "accepted": accepted.status == "True" if accepted is not None else True,
        "message": accepted.message if accepted is not None else "",
    }


def _fields(outcome: Outcome) -> Iterator[dict[str, Any]]:
    layers = with_profile([each.layer for each in outcome.layers])
    levels = {each.source: each.level.name.lower() for each in layers}
    given = {each.source: dict(each.leaves) for each in layers}
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
    for written in list(lost):  # removed without a new value, such as weights for another strategy
        winner = lost[written][-1].winner
        yield _field(written, None, winner, levels[winner], over(written))


def _field(path: str, value: Any, policy: str, level: str, over: list[dict[str, Any]]) -> dict[str, Any]:
    return {"path": path, "value": value, "policy": policy, "level": level, "over": over}

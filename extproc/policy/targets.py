"""What the TARGET of `kvmesh policy explain` means: `namespace/name`, `Kind/namespace/name` or `namespace`. Pure."""

import difflib
from collections.abc import Iterable, Mapping

from extproc.errors import KvmeshError
from extproc.policy.inference_policy import KIND as POLICY
from extproc.policy.reach import GROUPS, Reach
from kvmesh.documents.documents import DocumentKey

# as kubectl takes them, in lower case
KINDS: Mapping[str, str] = {
    **{kind.lower(): kind for kind in (*GROUPS, POLICY)},
    **{f"{kind.lower()}s": kind for kind in (*GROUPS, POLICY) if not kind.endswith("y")},
    **{"gateways": "Gateway", "inferencepolicies": POLICY},
    **{"infpool": "InferencePool", "svc": "Service", "gtw": "Gateway", "infpol": POLICY},
}


class PolicyTargetError(KvmeshError):
    """There is nothing of that name to explain; the message names what there is."""


def targeted_pools(target: str, reach: Reach, covers: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the pools that a target leads to, by name; raise PolicyTargetError.

    `covers`: the pools of each policy, "namespace/name". A pool's kind may be left out.
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

"""Pods with several data-parallel ranks behind one port: each rank is an endpoint of its own, `HOST:PORT#RANK`.

Ranks have caches, queues and events of their own. vLLM and SGLang send a request to the rank in a header; its value is
the rank's place among the pod's ranks. With hybrid load balancing the metrics and events of vLLM 0.32 number ranks over
all pods, and the header from 0 in each pod (`v1/engine/input_processor.py`, `core_client.py`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence

RANK_HEADER = "x-data-parallel-rank"
MARK = "#"
_RUNNING = b"\nvllm:num_requests_running{", b"\nsglang:num_running_reqs{"
_RANK = re.compile(rb"(?:" + b"|".join(_RUNNING) + rb')[^}\n]*\b(?:engine|dp_rank)="(\d{1,4})"')


def pod_of(endpoint: str) -> str:
    """Return the address of an endpoint's pod, HOST:PORT."""
    return endpoint.partition(MARK)[0]


def rank_of(endpoint: str) -> int | None:
    """Return the rank of an endpoint, or None if it is a whole pod."""
    rank = endpoint.partition(MARK)[2]
    return int(rank) if rank else None


def at_rank(pod: str, rank: int) -> str:
    """Return the endpoint of a pod's rank."""
    return f"{pod}{MARK}{rank}"


def named_in(endpoints: Iterable[str], pod: str | None) -> str | None:
    """Return the first of the endpoints that is the pod or one of its ranks; else the pod."""
    return next((endpoint for endpoint in endpoints if pod_of(endpoint) == pod), pod)


def ranks_on(page: bytes) -> tuple[int, ...]:
    """Return the ranks on a page of metrics, ascending; () if it has fewer than two."""
    if all(page.count(name) < 2 for name in _RUNNING):  # nearly always
        return ()
    found = sorted({int(rank) for rank in _RANK.findall(page)})
    return tuple(found) if len(found) > 1 else ()


def page_of(page: bytes, rank: int) -> bytes:
    """Return a page without the series of other ranks."""
    others = rb'(?m)^[^#\n][^\n]*\b(?:engine|dp_rank)="(?!%d")\d+"[^\n]*\n' % rank
    return re.sub(others, b"", page)


def one_a_pod(endpoints: Iterable[str], *, most: int) -> list[str]:
    """Return the first endpoints of different pods, at most so many."""
    first: dict[str, str] = {}
    for endpoint in endpoints:
        first.setdefault(pod_of(endpoint), endpoint)
    return list(first.values())[:most]


def pinned(endpoints: Sequence[str], ranks: Mapping[str, Sequence[int]]) -> tuple[Sequence[str], dict[str, str]]:
    """Return as many endpoints for a request, and the header with the first one's rank (`ranks`: pod -> its ranks).

    Envoy's retry sends the same header. So the others are ranks at the same place, and repeat where pods have none.
    """
    rank = rank_of(endpoints[0])
    if rank is None:
        return endpoints, {}
    known = ranks.get(pod_of(endpoints[0]), ())
    place = known.index(rank) if rank in known else rank
    named = [endpoints[0]]
    for pod in map(pod_of, endpoints[1:]):
        if place < len(of_pod := ranks.get(pod, ())) and (other := at_rank(pod, of_pod[place])) not in named:
            named.append(other)
    return (named * len(endpoints))[: len(endpoints)], {RANK_HEADER: str(place)}

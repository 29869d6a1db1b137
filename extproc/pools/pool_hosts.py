"""Maps a request to its pool by its host, its cluster, or the name by which Envoy calls the picker. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache


def pool_name(text: str) -> str:
    """Return "namespace/name" of `NAMESPACE/NAME[:PORT[:PODPORT]]`: only `kvmesh install` uses the ports.

    All commands share one settings file, so the same entry installs a pool and names it. Raise ValueError.
    """
    name = text.strip().partition(":")[0]
    namespace, slash, short = name.partition("/")
    if not slash or not namespace or not short or "/" in short:
        raise ValueError(f"{text[:200]!r} is not NAMESPACE/NAME")
    return name


# istiod's name for the pods of a Service; an InferencePool's pods have a separate Service `POOL-ip-HASH`
_CLUSTER = re.compile(r"outbound\|\d*\|[^|]*\|(?P<service>[^.|]+)\.(?P<namespace>[^.|]+)\.svc(\.|$)")
# the same, or the Service's own name in any of its lengths, with or without a port
_SERVICE = re.compile(
    r"(outbound\|\d*\|[^|]*\|)?(?P<service>[a-z0-9-]+)\.(?P<namespace>[a-z0-9-]+)(\.svc(\.[a-z0-9.-]*)?)?(:\d+)?"
)
_SHADOW = re.compile(r"-ip-[0-9a-f]{8}$")


class PoolHosts:
    """Hosts as policies write them: `api.example.com`, or `*.example.com` for all names below it.

    The most specific host wins; if several pools claim it, the first pool by name.
    """

    def __init__(self, hosts: Mapping[str, Iterable[str]]) -> None:
        self._exact: dict[str, str] = {}
        self._below: dict[str, str] = {}
        for pool in sorted(hosts):
            for host in hosts[pool]:
                name = host.lower()
                if name.startswith("*."):
                    self._below.setdefault(name[2:], pool)
                else:
                    self._exact.setdefault(name, pool)

    def __bool__(self) -> bool:
        return bool(self._exact or self._below)

    def pool_of(self, authority: str) -> str | None:
        """Return the pool of a request's `:authority`, with or without a port."""
        host = without_port(authority).lower().rstrip(".")
        pool = self._exact.get(host)
        if pool is not None or not self._below:
            return pool
        _, dot, rest = host.partition(".")
        while dot:
            pool = self._below.get(rest)
            if pool is not None:
                return pool
            _, dot, rest = rest.partition(".")
        return None


def without_port(authority: str) -> str:
    """Return the host alone; an IPv6 address keeps its brackets."""
    if authority.startswith("["):
        return authority.partition("]")[0] + "]"
    host, colon, port = authority.rpartition(":")
    return host if colon and port.isdigit() else authority


def pools_of_cluster(cluster: str) -> Sequence[str]:
    """Return the possible pool names of an Istio cluster, likeliest first; none for other clusters."""
    found = _CLUSTER.match(cluster)
    if found is None:
        return ()
    service, namespace = found["service"], found["namespace"]
    plain = _SHADOW.sub("", service)
    names = (f"{namespace}/{service}", f"{namespace}/{plain}")
    return names if plain != service else names[:1]


@lru_cache(maxsize=256)  # Envoys call a picker by the same few names
def service_of(authority: str) -> str:
    """Return "namespace/name" of the Service by which Envoy calls the picker, "" if it is not a Service's name."""
    found = _SERVICE.fullmatch(authority.lower())
    return f"{found['namespace']}/{found['service']}" if found is not None else ""


class PoolPickers:
    """Pools by the Service of their endpoint picker. A Service that several pools name identifies none of them."""

    def __init__(self, pickers: Mapping[str, str]) -> None:
        """`pickers`: pool -> "namespace/name" of the Service, "" for none."""
        uses = Counter(pickers.values())
        self._pools = {picker: pool for pool, picker in pickers.items() if picker and uses[picker] == 1}

    def pool_of(self, authority: str) -> str | None:
        """Return the pool whose picker Envoy calls by this `:authority`."""
        return self._pools.get(service_of(authority)) if self._pools else None

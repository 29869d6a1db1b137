"""Counts wrong tokens by address, so that nobody can try many. Pure: time is an argument. Used by the admin gate."""

from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from math import ceil

AT_ONCE = 10  # different wrong tokens of one address
SECONDS_EACH = 6.0  # until one of them is forgotten
ADDRESSES = 1024  # remembered; beyond, the one that failed longest ago is forgotten
IPV6_NETWORK_BITS = 64  # what one machine usually has


@dataclass(slots=True, kw_only=True)
class _Tries:
    count: float
    at: float  # monotonic seconds
    last: tuple[bytes, ...]  # digests, the newest at the end


class FailedTokens:
    """A bucket of tries for each address, that empties with time."""

    def __init__(self) -> None:
        self._tries: OrderedDict[str, _Tries] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tries)

    def wait_seconds(self, address: str, *, now: float) -> int:
        """Return for how long no token of this address is looked at: 0 for most. Whole seconds, rounded up."""
        tries = self._tries.get(_network(address))
        if tries is None:
            return 0
        return max(0, ceil((self._left(tries, now=now) - AT_ONCE + 1) * SECONDS_EACH))

    def failed(self, address: str, digest: bytes, *, now: float) -> bool:
        """Note a wrong token, by its digest; tell whether it counts.

        One of the last few again does not: who repeats himself guesses nothing, and old settings here and there must
        not lock out whoever shares their address (behind a sidecar: everybody).
        """
        network = _network(address)
        tries = self._tries.pop(network, None)
        if tries is None:
            tries = _Tries(count=0.0, at=now, last=())
            while len(self._tries) >= ADDRESSES:
                self._tries.popitem(last=False)
        self._tries[network] = tries
        counts = digest not in tries.last
        tries.count = self._left(tries, now=now) + counts
        tries.at = now
        tries.last = (*(each for each in tries.last if each != digest), digest)[-AT_ONCE:]
        return counts

    @staticmethod
    def _left(tries: _Tries, *, now: float) -> float:
        return max(0.0, tries.count - (now - tries.at) / SECONDS_EACH)


def _network(address: str) -> str:
    """Return an address, an IPv6 one without its second half: whoever has one has all of those."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(IPv6Address(int(parsed) >> IPV6_NETWORK_BITS << IPV6_NETWORK_BITS))
    return str(parsed)

"""Prefixes that stay hot: when one endpoint's hits make it wait, a further endpoint gets the prefix on purpose.

A single request leaves the warm endpoint by itself once waiting there costs more than the hit saves (`prefill-work`).
That spills late and to whoever is free. Here the pressure of many requests is watched, and one endpoint is chosen to
hold a copy, so that they spread over both. Pure; called by `pick`, time is an argument.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from extproc.policy.values import HotspotPolicy

KEY_BYTES = 8
# prefixes are watched at these depths (in keys): a system prompt is shared by all, the end of a chat by one
DEPTHS = (16, 64, 256, 1024)


@dataclass(slots=True)
class HotPrefix:
    """One prefix that is watched."""

    began_at: float  # of the window
    requests: int = 0  # under pressure, in the window
    copies: dict[str, float] = field(default_factory=dict)  # endpoint -> remembered until


class HotPrefixes:
    """The prefixes under pressure and where they were copied; bounded, the one not seen for longest goes first."""

    def __init__(self, policy: HotspotPolicy | None = None) -> None:
        self._policy = policy or HotspotPolicy()
        self._prefixes: OrderedDict[bytes, HotPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    def reconfigure(self, policy: HotspotPolicy) -> None:
        """Go by another policy from now on; copies that were made are remembered."""
        self._policy = policy
        while len(self._prefixes) > policy.most_prefixes:
            self._prefixes.popitem(last=False)

    def copy_to(
        self, keys: bytes, *, matched_keys: int, wait_tokens: float, saved_tokens: float, idlest: str, now: float
    ) -> HotPrefix | None:
        """Note a request whose warm endpoint makes it wait, and return the prefix to be copied to `idlest`, or None.

        Once the request really goes there, tell `copied`. `keys`: packed 8-byte keys of the prompt, of which the warm
        endpoint holds `matched_keys`. `wait_tokens`: how much longer the wait is there than at `idlest`, an endpoint
        without this prefix; `saved_tokens`: what the hit saves. Both in tokens.
        """
        policy = self._policy
        if not policy.enabled or wait_tokens < policy.pressure * saved_tokens:
            return None
        hot: HotPrefix | None = None
        for depth in DEPTHS:
            if depth > min(matched_keys, len(keys) // KEY_BYTES):  # the match may be that of several prompts
                break
            prefix = self._prefix(keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES], now)
            prefix.requests += 1
            if prefix.requests >= policy.least_requests:
                hot = prefix  # the deepest one: the more is shared, the more a copy is worth
        if hot is None:
            return None
        hot.copies = {endpoint: until for endpoint, until in hot.copies.items() if until > now}
        if len(hot.copies) >= policy.copies or idlest in hot.copies:
            return None
        return hot

    def copied(self, prefix: HotPrefix, *, endpoint: str, now: float) -> None:
        """Remember that a request with this prefix was sent to the endpoint, which holds it from then on."""
        prefix.copies[endpoint] = now + self._policy.remember_seconds
        prefix.requests, prefix.began_at = 0, now

    def _prefix(self, key: bytes, now: float) -> HotPrefix:
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = HotPrefix(now)
            if len(self._prefixes) > self._policy.most_prefixes:
                self._prefixes.popitem(last=False)
            return prefix
        self._prefixes.move_to_end(key)
        if now - prefix.began_at > self._policy.window_seconds:
            prefix.began_at, prefix.requests = now, 0
        return prefix

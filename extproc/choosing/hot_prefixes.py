"""Prefixes that stay hot: when one endpoint's hits make requests wait, a further endpoint gets the prefix on purpose.

A single request leaves the warm endpoint by itself once waiting there costs more than the hit saves (`prefill-work`).
That spills late and to whichever endpoint is free. Here the pressure of many requests is watched, and one endpoint is
chosen to hold a copy, so that they spread over both. `copy_of_hot_prefix` only looks; `HotPrefixes.note` remembers what
was decided. Pure; time is an argument.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from extproc.choosing.scorers import prefill_waits
from extproc.pods.endpoint import Candidate, Reachability
from extproc.policy.values import HotspotPolicy, PickPolicy
from extproc.prefixes.prompt_match import PromptKeys

KEY_BYTES = 8
# prefixes are watched at these depths (in keys): a system prompt is shared by all, the end of a chat by one
DEPTHS = (16, 64, 256, 1024)
# scorers that a hit counts for: with none of them, an endpoint is not picked for looking warm
MOVED_BY_HITS = ("prefill-work", "prefix")


@dataclass(slots=True)
class HotPrefix:
    """One prefix that is watched."""

    began_at: float  # of the window
    requests: int = 0  # under pressure, in the window
    copies: dict[str, float] = field(default_factory=dict)  # endpoint -> remembered until


class WarmWait(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose warm endpoint makes it wait, and the copy that follows from it where there were enough."""

    prefixes: tuple[bytes, ...]  # the prompt's prefixes that are watched, the shallowest first
    hot: bytes | None  # the one to be copied; None: none is hot enough
    endpoint: str  # that gets the copy
    words: str  # for people


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

    def look(
        self,
        keys: bytes,
        *,
        matched_keys: int,
        wait_tokens: float,
        saved_tokens: float,
        idlest: str,
        now: float,
        words: str = "",
    ) -> WarmWait | None:
        """Return what a request whose warm endpoint makes it wait would lead to; None: it does not wait long enough.

        `keys`: packed 8-byte keys of the prompt, of which the warm endpoint holds `matched_keys`. `wait_tokens`: how
        much longer the wait is there than at `idlest`, an endpoint without this prefix; `saved_tokens`: what the hit
        saves. Both in tokens.
        """
        policy = self._policy
        if not policy.enabled or wait_tokens < policy.pressure * saved_tokens:
            return None
        hot: bytes | None = None
        prefixes = []
        for depth in DEPTHS:
            if depth > min(matched_keys, len(keys) // KEY_BYTES):  # the match may be that of several prompts
                break
            key = keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
            prefixes.append(key)
            if self._requests(key, now) + 1 >= policy.least_requests:
                hot = key  # the deepest one: the more is shared, the more a copy is worth
        if not prefixes:
            return None
        copies = [] if hot is None else self._copies(hot, now)
        if len(copies) >= policy.copies or idlest in copies:
            hot = None
        return WarmWait(prefixes=tuple(prefixes), hot=hot, endpoint=idlest, words=words)

    def note(self, wait: WarmWait, *, endpoint: str, now: float) -> None:
        """Remember a request that had to wait and was sent to `endpoint`, which holds the prefix from then on."""
        for key in wait.prefixes:
            self._prefix(key, now).requests += 1
        if wait.hot is not None and wait.endpoint == endpoint:  # other scorers may have had their way
            prefix = self._prefix(wait.hot, now)
            prefix.copies = {each: until for each, until in prefix.copies.items() if until > now}
            prefix.copies[endpoint] = now + self._policy.remember_seconds
            prefix.requests, prefix.began_at = 0, now

    def _requests(self, key: bytes, now: float) -> int:
        prefix = self._prefixes.get(key)
        if prefix is None or now - prefix.began_at > self._policy.window_seconds:
            return 0
        return prefix.requests

    def _copies(self, key: bytes, now: float) -> list[str]:
        prefix = self._prefixes.get(key)
        return [] if prefix is None else [endpoint for endpoint, until in prefix.copies.items() if until > now]

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


def copy_of_hot_prefix(
    kept: Sequence[Candidate],
    prompts: Sequence[PromptKeys],
    *,
    hot: HotPrefixes,
    policy: PickPolicy,
    now: float,
) -> tuple[Sequence[Candidate], WarmWait | None]:
    """Return the candidates, one of which counts as warm where it shall become so, and what is to be noted.

    `kept` are those that may serve: only they hold or get anything here.
    """
    if not prompts or not _is_worth_a_look(kept, policy):
        return kept, None
    most = max((candidate.saved_tokens for candidate in kept), default=0.0)
    holders = [i for i, candidate in enumerate(kept) if candidate.saved_tokens == most]
    if most <= 0.0 or any(_is_idle(kept[i]) for i in holders):
        return kept, None
    waits = prefill_waits(kept, scales=policy.scales)
    warm = min(holders, key=lambda i: waits[i])  # it would take the request
    idlest = min(
        (i for i, candidate in enumerate(kept) if _may_take(candidate) and candidate.saved_tokens < most),
        key=lambda i: waits[i],
        default=None,
    )
    if idlest is None or waits[warm] <= waits[idlest]:
        return kept, None
    prompt, target = prompts[0], kept[idlest]
    wait = hot.look(
        prompt.keys,
        matched_keys=kept[warm].matched_tokens // prompt.tokens_each,
        wait_tokens=waits[warm] - waits[idlest],
        saved_tokens=most - target.saved_tokens,
        idlest=target.address,
        now=now,
        words=f"hot prefix: {target.address} gets a copy of what {kept[warm].address} holds",
    )
    if wait is None or wait.hot is None:
        return kept, wait
    warmed = msgspec.structs.replace(target, worth_tokens=most)
    return [warmed if candidate is target else candidate for candidate in kept], wait


def _is_worth_a_look(candidates: Sequence[Candidate], policy: PickPolicy) -> bool:
    if not policy.hotspot.enabled or len(candidates) < 2:
        return False
    for candidate in candidates:
        if candidate.matched_tokens and not _is_idle(candidate):
            return any(name in policy.weights for name in MOVED_BY_HITS)
    return False


def _is_idle(candidate: Candidate) -> bool:
    return not candidate.backlog_tokens and (candidate.load is None or not candidate.load.waiting_requests)


def _may_take(candidate: Candidate) -> bool:
    """Tell whether it is known to be fine: filters that gave way keep what is not."""
    return candidate.reachability is Reachability.READY and candidate.load is not None and candidate.unhealthy is None

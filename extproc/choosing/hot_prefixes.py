"""Hot prefixes: when requests queue at the endpoint that holds their prefix, give a copy to another endpoint.

The `prefill-work` scorer already moves a single request away once waiting costs more than the hit saves. That happens
late, and to any free endpoint. This module adds up the pressure of many requests and chooses one endpoint for a copy,
so that they spread over both. `copy_of_hot_prefix` changes nothing; `HotPrefixes.note` records the decision. Pure; time
is an argument.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from extproc.choosing.scorers import prefill_waits
from extproc.pods.endpoint import Candidate, Reachability
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import PromptKeys

KEY_BYTES = 8
# depths in keys: from a system prompt, shared by many requests, to the end of one chat
DEPTHS = (16, 64, 256, 1024)
# scorers that reward a hit: without one of them, marking an endpoint as warm has no effect
MOVED_BY_HITS = ("prefill-work", "prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class HotLimits:
    """When a prefix is hot."""

    pressure: float = 1.0  # the longer wait at the prefix's endpoint, as a share of the saved tokens
    least_requests: int = 8  # under pressure, within the window
    window_seconds: float = 5.0
    copies: int = 1  # of each prefix beside the first holder's
    remember_seconds: float = 60.0  # a copy
    most_prefixes: int = 1024


@dataclass(slots=True)
class HotPrefix:
    """The pressure on one prefix, and its copies."""

    began_at: float  # start of the window
    requests: int = 0  # requests under pressure in the window
    copies: dict[str, float] = field(default_factory=dict)  # endpoint -> expiry


class WarmWait(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has to wait at its warm endpoint, and the copy to make if the prefix is hot."""

    prefixes: tuple[bytes, ...]  # the prompt's tracked prefixes, shortest first
    hot: bytes | None  # the prefix to copy, or None if none is hot enough
    endpoint: str  # target of the copy
    words: str  # for people


class HotPrefixes:
    """The prefixes under pressure and their copies; an LRU map with a bound."""

    def __init__(self, limits: HotLimits | None = None) -> None:
        self._limits = limits or HotLimits()
        self._prefixes: OrderedDict[bytes, HotPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

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
        """Return the wait at the warm endpoint with the copy it calls for, or None if the wait is too short.

        `keys`: packed 8-byte keys of the prompt; the warm endpoint holds the first `matched_keys`. `wait_tokens`: extra
        wait there versus `idlest`, an endpoint with a shorter hit. `saved_tokens`: tokens saved by the longer hit.
        """
        limits = self._limits
        if wait_tokens < limits.pressure * saved_tokens:
            return None
        hot: bytes | None = None
        prefixes = []
        for depth in DEPTHS:
            if depth > min(matched_keys, len(keys) // KEY_BYTES):  # matched_keys may add up several prompts
                break
            key = keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
            prefixes.append(key)
            if self._requests(key, now) + 1 >= limits.least_requests:
                hot = key  # prefer the longest prefix: its copy saves most
        if not prefixes:
            return None
        copies = [] if hot is None else self._copies(hot, now)
        if len(copies) >= limits.copies or idlest in copies:
            hot = None
        return WarmWait(prefixes=tuple(prefixes), hot=hot, endpoint=idlest, words=words)

    def note(self, wait: WarmWait, *, endpoint: str, now: float) -> None:
        """Record a request under pressure, sent to `endpoint`, and the copy there if it was the copy's target."""
        for key in wait.prefixes:
            self._prefix(key, now).requests += 1
        if wait.hot is not None and wait.endpoint == endpoint:  # other scorers may have outvoted the copy
            prefix = self._prefix(wait.hot, now)
            prefix.copies = {each: until for each, until in prefix.copies.items() if until > now}
            prefix.copies[endpoint] = now + self._limits.remember_seconds
            prefix.requests, prefix.began_at = 0, now

    def _requests(self, key: bytes, now: float) -> int:
        prefix = self._prefixes.get(key)
        if prefix is None or now - prefix.began_at > self._limits.window_seconds:
            return 0
        return prefix.requests

    def _copies(self, key: bytes, now: float) -> list[str]:
        prefix = self._prefixes.get(key)
        return [] if prefix is None else [endpoint for endpoint, until in prefix.copies.items() if until > now]

    def _prefix(self, key: bytes, now: float) -> HotPrefix:
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = HotPrefix(now)
            if len(self._prefixes) > self._limits.most_prefixes:
                self._prefixes.popitem(last=False)
            return prefix
        self._prefixes.move_to_end(key)
        if now - prefix.began_at > self._limits.window_seconds:
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
    """Return the candidates, one marked warm if it should get a copy, and the note to store.

    `kept`: the eligible endpoints. Only their hits count, and only they get copies.
    """
    if not prompts or not _is_worth_a_look(kept, policy):
        return kept, None
    most = max((candidate.saved_tokens for candidate in kept), default=0.0)
    holders = [i for i, candidate in enumerate(kept) if candidate.saved_tokens == most]
    if most <= 0.0 or any(_is_idle(kept[i]) for i in holders):
        return kept, None
    waits = prefill_waits(kept)
    warm = min(holders, key=lambda i: waits[i])  # the request would go there
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
    if not policy.copy_hot_prefixes or len(candidates) < 2:
        return False
    for candidate in candidates:
        if candidate.matched_tokens and not _is_idle(candidate):
            return any(name in policy.weights for name in MOVED_BY_HITS)
    return False


def _is_idle(candidate: Candidate) -> bool:
    return not candidate.backlog_tokens and (candidate.load is None or not candidate.load.waiting_requests)


def _may_take(candidate: Candidate) -> bool:
    """Tell whether it is known to be fine; a lenient filter may have kept one that is not."""
    return candidate.reachability is Reachability.READY and candidate.load is not None and candidate.unhealthy is None

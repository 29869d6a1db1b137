"""Sends one request of a hot prefix to an idle endpoint, so that it is cached there too; called by `pick`."""

from collections.abc import Sequence

import msgspec

from extproc.choosing.hotspot import HotPrefix, HotPrefixes
from extproc.choosing.token_cost import prefill_waits
from extproc.pods.endpoint import Candidate, Reachability
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import PromptKeys

# scorers that a hit counts for: with none of them, an endpoint is not picked for looking warm
MOVED_BY_HITS = ("prefill-work", "prefix")


class PrefixCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy that is made if the request goes to `endpoint`: then tell `HotPrefixes.copied`."""

    endpoint: str
    prefix: HotPrefix
    words: str  # for people


def copy_of_hot_prefix(
    kept: Sequence[Candidate],
    prompts: Sequence[PromptKeys],
    *,
    hot: HotPrefixes,
    policy: PickPolicy,
    now: float,
) -> tuple[Sequence[Candidate], PrefixCopy | None]:
    """Return the candidates and None, or with one that counts as warm because it shall become so, and the copy.

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
    prefix = hot.copy_to(
        prompt.keys,
        matched_keys=kept[warm].matched_tokens // prompt.tokens_each,
        wait_tokens=waits[warm] - waits[idlest],
        saved_tokens=most - target.saved_tokens,
        idlest=target.address,
        now=now,
    )
    if prefix is None:
        return kept, None
    warmed = msgspec.structs.replace(target, worth_tokens=most)
    words = f"hot prefix: {target.address} gets a copy of what {kept[warm].address} holds"
    return (
        [warmed if candidate is target else candidate for candidate in kept],
        PrefixCopy(endpoint=target.address, prefix=prefix, words=words),
    )


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

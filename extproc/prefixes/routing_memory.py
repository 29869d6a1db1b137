"""What this replica remembers of its own picks: which prompts went where, and which sessions and adapters.

Bounded; time is an argument.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import LIVE, PromptKeys
from extproc.prefixes.recent_routes import KEY_BYTES, NOTHING_HELD, RecentRoutes, checkpoints


class LastPlaces:
    """Name -> endpoint, for `ttl_seconds` after its last request; at most `limit` names."""

    def __init__(self, *, ttl_seconds: float, limit: int = 65536) -> None:
        self._ttl_seconds = ttl_seconds
        self._limit = limit
        self._places: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def reconfigure(self, *, ttl_seconds: float) -> None:
        """Remember for another time from now on."""
        self._ttl_seconds = ttl_seconds

    def note(self, name: str, *, endpoint: str, now: float) -> None:
        """Remember that a request of this name was sent to the endpoint."""
        self._places[name] = endpoint, now
        self._places.move_to_end(name)
        if len(self._places) > self._limit:
            self._places.popitem(last=False)

    def get(self, name: str, *, now: float) -> str | None:
        """Return where its last request was sent, or None if that is too long ago."""
        place = self._places.get(name)
        return place[0] if place is not None and now - place[1] <= self._ttl_seconds else None


# checkpoints of prompts: a long prompt has about 50 of them, each takes some 100 bytes
FOLLOWED_LIMIT = 100_000
UNFOLLOWED_LIMIT = 400_000
ADAPTER_SECONDS = 30.0  # a pod's own metrics tell about its adapters well within

RecentHits = tuple[Mapping[str, int], int]  # endpoint -> leading keys, tokens a key


class RoutingMemory:
    """All that is remembered between requests to route the next one."""

    def __init__(self, policy: PickPolicy) -> None:
        self._followed = RecentRoutes(ttl_seconds=policy.recent_prefix_seconds, limit=FOLLOWED_LIMIT)
        # where no events tell what a pod holds, what was sent there is all that there is to go by
        self._unfollowed = RecentRoutes(ttl_seconds=policy.unfollowed_prefix_seconds, limit=UNFOLLOWED_LIMIT)
        self._sessions = LastPlaces(ttl_seconds=policy.session_seconds)
        self._adapters = LastPlaces(ttl_seconds=ADAPTER_SECONDS)

    def reconfigure(self, policy: PickPolicy, *, share: float = 1.0) -> None:
        """Remember as another policy says from now on. `share`: of the memory that all pools of a picker have."""
        self._followed.reconfigure(ttl_seconds=policy.recent_prefix_seconds, limit=int(FOLLOWED_LIMIT * share))
        self._unfollowed.reconfigure(ttl_seconds=policy.unfollowed_prefix_seconds, limit=int(UNFOLLOWED_LIMIT * share))
        self._sessions.reconfigure(ttl_seconds=policy.session_seconds)

    def note(
        self,
        endpoint: str,
        *,
        prompts: Sequence[PromptKeys],
        session: str | None,
        adapter: str | None,
        now: float,
        indexed: bool = False,
    ) -> None:
        """Remember one routed request; `indexed`: the index knows all of its keys there, nothing has to be expected."""
        for prompt in prompts:
            keys = prompt.keys
            if len(keys) >= KEY_BYTES:
                cut = checkpoints(keys)  # once for both
                if not indexed:
                    self._followed.note(keys, endpoint=endpoint, now=now, cut=cut)
                # also what is indexed: the index may fail, or the endpoint's events end
                self._unfollowed.note(keys, endpoint=endpoint, now=now, cut=cut)
        if session is not None:
            self._sessions.note(session, endpoint=endpoint, now=now)
        if adapter is not None:
            self._adapters.note(f"{adapter}\0{endpoint}", endpoint=endpoint, now=now)

    def matches(
        self,
        prompts: Sequence[PromptKeys],
        *,
        states: Mapping[str, str],
        endpoints: Iterable[str],
        now: float,
        indexed: Mapping[str, int] = NOTHING_HELD,
    ) -> list[RecentHits]:
        """Return for each prompt who was sent its beginning: lately, or long ago where no events are followed.

        `indexed`: endpoint -> tokens of the one prompt that the index knows there. Where its events are followed, what
        was sent lately is expected only until it has been among these once.
        """
        unfollowed = [endpoint for endpoint in endpoints if states.get(endpoint) != LIVE]
        hits: list[RecentHits] = []
        for prompt in prompts:
            held = NOTHING_HELD
            if indexed:
                held = {
                    endpoint: tokens // prompt.tokens_each
                    for endpoint, tokens in indexed.items()
                    if states.get(endpoint) == LIVE
                }
            recent = self._followed.match(prompt.keys, now=now, held=held)
            if unfollowed:
                older = self._unfollowed.match(prompt.keys, now=now)
                recent = {**recent, **{endpoint: older[endpoint] for endpoint in unfollowed if endpoint in older}}
            hits.append((recent, prompt.tokens_each))
        return hits

    def session_place(self, session: str, *, now: float) -> str | None:
        """Return where the session's last request went."""
        return self._sessions.get(session, now=now)

    def has_adapter(self, adapter: str, endpoint: str, *, now: float) -> bool:
        """Tell whether a request for the adapter was sent there lately: it is loaded or being loaded."""
        return self._adapters.get(f"{adapter}\0{endpoint}", now=now) is not None

    def forget(self, endpoint: str) -> None:
        """Drop what was expected in the cache of a pod that is another process now."""
        self._followed.forget(endpoint)
        self._unfollowed.forget(endpoint)

"""Looks at a sample of the routed requests for the prefix tree of one pool. Told by `live_feed` after each answer.

Looks at all requests while there are few, and at about `NOTES_PER_SECOND` of them where there are many, so that the
tree costs no pick more than a few microseconds. Prompts are known to it by their block keys; of their token ids it
keeps the beginning of each edge, and only where the policy lets the page show text.
"""

from collections.abc import Callable

from extproc.admission.prepared_request import Picked, Prepared
from extproc.prefixes.prefix_tree import Origin, PrefixTree, TreeView

NOTES_PER_SECOND = 5
HALF_LIFE_SECONDS = 300.0
MOST_ORIGINS = 1000  # models and adapters: clients may name any
LONGEST_MODEL = 200  # characters


class PrefixWatch:
    """The tree of one pool. `random` returns 0..1: a steady step would meet the same client of a few each time."""

    def __init__(
        self,
        *,
        shows_text: bool,
        clock: Callable[[], float],
        random: Callable[[], float],
        most_bytes: int = 4 << 20,
    ) -> None:
        self._shows_text = shows_text
        self._clock = clock
        self._random = random
        self._tree = PrefixTree(half_life_seconds=HALF_LIFE_SECONDS, most_bytes=most_bytes, started_at=clock())
        self._origins: dict[tuple[str, str | None, int, bool, bool], Origin] = {}
        self._passed = 0  # requests since the last one that was looked at
        self._wait_for = 1
        self._counted_since = clock()
        self._counted = 0
        self._step = 1.0  # requests to one that is looked at

    @property
    def shows_text(self) -> bool:
        """Whether the beginning of prompts is kept."""
        return self._shows_text

    @property
    def sampled_share(self) -> float:
        """Which share of the requests is looked at now, 0..1."""
        return 1.0 / max(self._step, 1.0)

    def reconfigure(self, *, shows_text: bool | None = None, most_bytes: int | None = None) -> None:
        """Keep text or not, and so much, from now on; text that is not to be shown any more is forgotten at once."""
        if most_bytes is not None:
            self._tree.reconfigure(most_bytes=most_bytes)
        if shows_text is not None:
            if self._shows_text and not shows_text:
                self._tree.forget_text()
            self._shows_text = shows_text

    def routed(self, picked: Picked) -> None:
        """Count a request, if its turn has come."""
        self._passed += 1
        if self._passed >= self._wait_for:
            self._look(picked)

    def view(self, *, limit: int) -> TreeView:
        """Return what was asked for most."""
        return self._tree.view(limit=limit, now=self._clock())

    def _look(self, picked: Picked) -> None:
        passed, self._passed = self._passed, 0
        now = self._clock()
        self._pace(passed, now)
        prepared = picked.prepared
        if not prepared.query.prompts:
            return
        first = prepared.query.prompts[0]  # of a batch the others would be counted as requests of their own
        tokens = b""
        origin = self._origin(prepared, first.tokens_each)
        if self._shows_text and not origin.private and prepared.tokens.prompts:
            tokens = prepared.tokens.prompts[0].tokens
        self._tree.note(
            first.keys,
            origin=origin,
            matched_tokens=picked.decision.matched_tokens,
            now=now,
            weight=passed,
            tokens=tokens,
        )

    def _pace(self, passed: int, now: float) -> None:
        """Set how many requests pass until the next one is looked at, by the rate of the last second or this one."""
        self._counted += passed
        if now - self._counted_since >= 1.0:
            self._step = self._counted / (now - self._counted_since) / NOTES_PER_SECOND
            self._counted, self._counted_since = 0, now
        step = max(self._step, self._counted / NOTES_PER_SECOND)
        # any number around the step, so that its mean is the step
        self._wait_for = 1 if step <= 1.0 else 1 + int(self._random() * (2 * step - 1))

    def _origin(self, prepared: Prepared, tokens_each: int) -> Origin:
        resolved = prepared.asked.resolved
        model = resolved.base.name if resolved.base is not None else (resolved.model or "")
        indexed, private = not prepared.tokens.chunks, prepared.asked.request.cache_salt is not None
        key = (model, resolved.adapter, tokens_each, indexed, private)
        origin = self._origins.get(key)
        if origin is None:
            if len(self._origins) >= MOST_ORIGINS:
                self._origins.clear()  # those in the tree stay alive
            origin = self._origins[key] = Origin(
                model=model[:LONGEST_MODEL],
                adapter=None if resolved.adapter is None else resolved.adapter[:LONGEST_MODEL],
                tokens_each=tokens_each,
                indexed=indexed,
                private=private,
            )
        return origin

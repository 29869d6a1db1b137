"""The prefixes that one pool has routed lately: samples requests into a tree, and shows the tree. Pure.

At low rates every request is sampled, at high rates about `NOTES_PER_SECOND`, so that the tree costs a pick at most a
few microseconds. The tree stores prompts as block keys. It stores token ids only for the beginning of each edge, and
only if the policy lets the page show text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from extproc.admission.prepared_request import Picked, Prepared
from extproc.pages.picker_state import HolderState, PrefixNode
from extproc.prefixes.prefix_tree import KEY_BYTES, Origin, PrefixTree, TreeEdge, TreeView

NOTES_PER_SECOND = 5
HALF_LIFE_SECONDS = 300.0
MOST_ORIGINS = 1000  # models and adapters: clients may name any
LONGEST_MODEL = 200  # characters
LOOKUPS_PER_EDGE = 16  # sampled blocks per edge; the others are assumed to be like these
MOST_HOLDERS = 64  # shown per prefix, the largest first: a thousand pods may hold each of a hundred prefixes


class PrefixWatch:
    """The tree of one pool. `shows_text` says whether the current policy shows the beginning of prompts.

    `random` returns 0..1. It varies the sampling step: a fixed step might always hit the same of a few clients.
    """

    def __init__(
        self,
        *,
        shows_text: Callable[[], bool],
        clock: Callable[[], float],
        random: Callable[[], float],
        most_bytes: int = 4 << 20,
    ) -> None:
        self._shows_text = shows_text
        self._keeps_text = False
        self._clock = clock
        self._random = random
        self._tree = PrefixTree(half_life_seconds=HALF_LIFE_SECONDS, most_bytes=most_bytes, started_at=clock())
        self._origins: dict[tuple[str, str | None, int, bool, bool], Origin] = {}
        self._passed = 0  # requests since the last sample
        self._wait_for = 1
        self._counted_since = clock()
        self._counted = 0
        self._step = 1.0  # requests per sample

    def shows_text(self) -> bool:
        """Return whether text may be shown now; drop stored text if it no longer may."""
        shows = self._shows_text()
        if self._keeps_text and not shows:
            self._tree.forget_text()
        self._keeps_text = shows
        return shows

    @property
    def sampled_share(self) -> float:
        """The current share of sampled requests, 0..1."""
        return 1.0 / max(self._step, 1.0)

    def limit(self, *, most_bytes: int) -> None:
        """Change the memory limit."""
        self._tree.reconfigure(most_bytes=most_bytes)

    def routed(self, picked: Picked) -> None:
        """Count a request, and sample it if it is due."""
        self._passed += 1
        if self._passed >= self._wait_for:
            self._look(picked)

    def view(self, *, limit: int) -> TreeView:
        """Return the most requested prefixes."""
        self.shows_text()
        return self._tree.view(limit=limit, now=self._clock())

    def _look(self, picked: Picked) -> None:
        passed, self._passed = self._passed, 0
        now = self._clock()
        self._pace(passed, now)
        prepared = picked.prepared
        if not prepared.query.prompts:
            return
        first = prepared.query.prompts[0]  # only the first of a batch: each further prompt would count as a request
        tokens = b""
        origin = self._origin(prepared, first.tokens_each)
        if self.shows_text() and not origin.private and prepared.tokens.prompts:
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
        """Set how many requests to skip until the next sample, by the rate of the last or the current second."""
        self._counted += passed
        if now - self._counted_since >= 1.0:
            self._step = self._counted / (now - self._counted_since) / NOTES_PER_SECOND
            self._counted, self._counted_since = 0, now
        step = max(self._step, self._counted / NOTES_PER_SECOND)
        # random, with the step as its mean
        self._wait_for = 1 if step <= 1.0 else 1 + int(self._random() * (2 * step - 1))

    def _origin(self, prepared: Prepared, tokens_each: int) -> Origin:
        resolved = prepared.asked.resolved
        model = resolved.base.name if resolved.base is not None else (resolved.model or "")
        indexed, private = not prepared.tokens.chunks, prepared.asked.request.cache_salt is not None
        key = (model, resolved.adapter, tokens_each, indexed, private)
        origin = self._origins.get(key)
        if origin is None:
            if len(self._origins) >= MOST_ORIGINS:
                self._origins.clear()  # origins in the tree stay alive
            origin = self._origins[key] = Origin(
                model=model[:LONGEST_MODEL],
                adapter=None if resolved.adapter is None else resolved.adapter[:LONGEST_MODEL],
                tokens_each=tokens_each,
                indexed=indexed,
                private=private,
            )
        return origin


def sampled_keys(edge: TreeEdge) -> bytes:
    """Return an edge's sampled keys for a lookup: evenly spaced, including the last. Text chunks have none."""
    if not edge.origin.indexed:
        return b""
    count = min(edge.blocks, LOOKUPS_PER_EDGE)
    at = [edge.blocks * (i + 1) // count - 1 for i in range(count)]
    return b"".join([edge.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in at])


def prefix_nodes(
    view: TreeView,
    *,
    holders: Sequence[Mapping[str, str]] | None,
    cached_blocks: int | None,
    unix_at: Callable[[float], float],
    name_of: Callable[[bytes], str],
    text_of: Callable[[TreeEdge], str | None],
) -> Iterator[PrefixNode]:
    """Yield the tree's nodes; each may take a millisecond if hundreds of pods hold it.

    `holders` maps endpoint -> tier for each key of `sampled_keys`. It is None if the index is unreadable; the pool's
    `cached_blocks` are then unknown, too. `unix_at` converts the tree's seconds to unix seconds. `name_of` turns a key
    into a name that does not reveal its prompt.
    """
    at = 0
    for edge in view.edges:
        looked_up = len(sampled_keys(edge)) // KEY_BYTES
        found = None if holders is None or not edge.origin.indexed else _holders(edge, holders[at : at + looked_up])
        at += looked_up
        held = None if found is None else sum(holder.blocks for holder in found)
        yield PrefixNode(
            id=name_of(edge.key),
            parent=None if edge.parent is None else name_of(edge.parent),
            model=edge.origin.model,
            adapter=edge.origin.adapter,
            depth=edge.depth,
            from_tokens=edge.first * edge.origin.tokens_each,
            tokens=edge.blocks * edge.origin.tokens_each,
            blocks=edge.blocks,
            requests=round(edge.requests, 2),
            share_of_requests=_share(edge.requests, view.requests),
            hit_tokens=round(edge.hit_tokens),
            share_of_hits=_share(edge.hit_tokens, view.hit_tokens),
            holders=None if found is None else found[:MOST_HOLDERS],
            holders_left_out=max(len(found or ()) - MOST_HOLDERS, 0),
            held_blocks=held,
            share_of_memory=None if held is None or not cached_blocks else _share(held, cached_blocks),
            last_at=unix_at(edge.seen_at),
            text=text_of(edge) if edge.head else None,
        )


def index_state(view: TreeView, holders: Sequence[Mapping[str, str]] | None) -> str:
    """Return whether the index shows holders: ok, unavailable, or no-tokens if all prompts are text chunks."""
    if holders is None:
        return "unavailable"
    return "ok" if any(edge.origin.indexed for edge in view.edges) or not view.edges else "no-tokens"


def _holders(edge: TreeEdge, found: Sequence[Mapping[str, str]]) -> list[HolderState]:
    """Return the holders of an edge, estimated from its sampled blocks, largest first."""
    alike: dict[int, tuple[Mapping[str, str], int]] = {}  # blocks with the same holders are the same mapping
    for held in found:
        alike[id(held)] = held, alike.get(id(held), (held, 0))[1] + 1
    tiers: dict[str, dict[str, int]] = {}
    for held, times in alike.values():
        for endpoint, tier in held.items():
            counts = tiers.setdefault(endpoint, {})
            counts[tier] = counts.get(tier, 0) + times
    scale = edge.blocks / max(len(found), 1)
    holders = []
    for endpoint, counts in tiers.items():
        blocks = {tier: round(number * scale) for tier, number in counts.items()}
        holders.append(HolderState(endpoint=endpoint, blocks=sum(blocks.values()), tiers=blocks))
    return sorted(holders, key=lambda holder: (-holder.blocks, holder.endpoint))


def _share(some: float, everything: float) -> float:
    return round(min(some / everything, 1.0), 5) if everything > 0 else 0.0

"""Recent prompts as a radix tree of block keys: the most common prefixes, and the tokens that their hits save.

Fed with a sample of the requests, read by pages. Pure; bounded by memory; time is an argument.
Counts halve every `half_life_seconds` (forward decay: new requests count more, so that old counts need no update;
http://dimacs.rutgers.edu/~graham/pubs/papers/fwddecay.pdf).
"""

from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import exp2
from operator import attrgetter

import msgspec

KEY_BYTES = 8
MOST_KEYS = 2048  # per prompt: 32,768 tokens in blocks of 16; the rest is ignored
NODE_BYTES = 400  # of memory, without its keys
FORGOTTEN_AT_ONCE = 250  # nodes, about a millisecond; a far too large tree goes on shrinking with the next prompts
SAMPLED_LEAVES = 8  # the least requested one of these is removed
MOST_HALF_LIVES = 40.0  # then all counts are scaled down, long before they overflow
HEAD_TOKENS = 32  # kept of an edge's beginning if text may be shown
TOKEN_BYTES = 4
ALIKE = 0.999  # a child with at least this share of its parent's requests continues the parent's edge


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The common properties of all prompts with the same first key."""

    model: str
    adapter: str | None = None
    tokens_each: int  # per key
    indexed: bool = True  # block keys; False for keys of text chunks, which have no events
    private: bool = False  # salted: its text is never stored


class TreeEdge(msgspec.Struct, frozen=True, kw_only=True):
    """A path of the tree without branches, for pages."""

    key: bytes  # the last of `keys`: identifies the whole prefix up to its end
    parent: bytes | None
    origin: Origin
    depth: int
    first: int  # keys before this edge
    keys: bytes  # packed, its own
    requests: float  # decayed, as are the hit tokens
    hit_tokens: float
    seen_at: float  # time of the last request
    head: bytes  # token ids of its beginning, b"" if not stored

    @property
    def blocks(self) -> int:
        """Number of keys of this edge."""
        return len(self.keys) // KEY_BYTES


class TreeView(msgspec.Struct, frozen=True, kw_only=True):
    """The most requested edges: parents before children, siblings by descending requests."""

    edges: tuple[TreeEdge, ...]
    requests: float  # decayed, of all
    hit_tokens: float
    left_out: int  # nodes of the tree outside these edges


class _Node:
    __slots__ = ("children", "edge", "head", "hits", "origin", "parent", "seen_at", "slot", "weight")

    def __init__(self, edge: bytes, parent: "_Node | None", origin: Origin) -> None:
        self.edge = edge
        self.parent = parent
        self.origin = origin
        self.children: dict[bytes, _Node] | None = None
        self.weight = 0.0  # requests, in units of the scale
        self.hits = 0.0  # bytes of keys expected in a cache, in units of the scale
        self.seen_at = 0.0
        self.slot = -1  # index in the leaves, -1 if it is no leaf
        self.head = b""


_NOWHERE = Origin(model="", tokens_each=1)


class PrefixTree:
    """Counts prompts by their leading keys; `most_bytes` bounds the memory by evicting rarely requested leaves."""

    def __init__(self, *, half_life_seconds: float = 300.0, most_bytes: int = 4 << 20, started_at: float = 0.0) -> None:
        self._half_life = half_life_seconds
        self._most_bytes = most_bytes
        self._scale_from = started_at
        self._root = _Node(b"", None, _NOWHERE)
        self._leaves: list[_Node] = []
        self._hand = 0
        self._nodes = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._nodes

    def reconfigure(self, *, most_bytes: int) -> None:
        """Set the memory limit; a larger tree shrinks in steps, with each prompt and each call."""
        self._most_bytes = most_bytes
        self._keep_small()

    def note(
        self,
        keys: bytes,
        *,
        origin: Origin,
        matched_tokens: int,
        now: float,
        weight: float = 1.0,
        tokens: bytes = b"",
    ) -> None:
        """Count a prompt routed at `now`, with the expected hit (`matched_tokens`) at its endpoint.

        `weight`: the requests that it stands for; `tokens`: its token ids, if the edges' heads should be stored.
        """
        if not keys:
            return
        keys = keys[: MOST_KEYS * KEY_BYTES]
        scaled = weight * self._scale(now)
        matched = min(matched_tokens // origin.tokens_each * KEY_BYTES, len(keys))
        node, at, end = self._root, 0, len(keys)
        node.weight += scaled
        node.hits += scaled * matched * origin.tokens_each
        while at < end:
            child = None if node.children is None else node.children.get(keys[at : at + KEY_BYTES])
            if child is None:
                child = self._grow(node, keys[at:], origin)
            elif not keys.startswith(child.edge, at):
                child = self._split(child, _common(child.edge, keys[at : at + len(child.edge)]))
            child.weight += scaled
            if matched > at:
                child.hits += scaled * min(matched - at, len(child.edge))
            child.seen_at = now
            if tokens and not child.head:
                start = at // KEY_BYTES * origin.tokens_each * TOKEN_BYTES
                child.head = tokens[start : start + HEAD_TOKENS * TOKEN_BYTES]
            at += len(child.edge)
            node = child
        if self._bytes > self._most_bytes:
            self._keep_small()

    def view(self, *, limit: int, now: float) -> TreeView:
        """Return the `limit` most requested edges, with counts as of `now`."""
        scale = self._scale(now)
        edges: list[TreeEdge] = []
        waiting: list[tuple[float, int, _Node, bytes | None, int, int]] = []
        best: list[float] = []  # heap of the `limit` largest weights so far
        tie, shown = count(), 0

        def add(parent: _Node, key: bytes | None, depth: int, first: int) -> None:
            for child in (parent.children or {}).values():
                weight = child.weight
                if len(best) < limit:
                    heappush(best, weight)
                elif weight > best[0]:
                    heapreplace(best, weight)
                else:
                    continue
                heappush(waiting, (-weight, next(tie), child, key, depth, first))

        add(self._root, None, 0, 0)
        while waiting and len(edges) < limit:
            _, _, node, parent, depth, first = heappop(waiting)
            last, keys, hits, nodes = _unbranched(node)
            shown += nodes
            edge = TreeEdge(
                key=keys[-KEY_BYTES:],
                parent=parent,
                origin=node.origin,
                depth=depth,
                first=first,
                keys=keys,
                requests=node.weight / scale,
                hit_tokens=hits / KEY_BYTES * node.origin.tokens_each / scale,
                seen_at=node.seen_at,
                head=node.head,
            )
            edges.append(edge)
            add(last, edge.key, depth + 1, first + edge.blocks)
        return TreeView(
            edges=tuple(edges),
            requests=self._root.weight / scale,
            hit_tokens=self._root.hits / KEY_BYTES / scale,
            left_out=self._nodes - shown,
        )

    def forget_text(self) -> None:
        """Drop the token ids of all edges."""
        for node in self._all():
            node.head = b""

    def _scale(self, now: float) -> float:
        """Return the weight of a request at `now`; when it becomes large, all counts are scaled down."""
        half_lives = (now - self._scale_from) / self._half_life
        if half_lives < MOST_HALF_LIVES:
            return exp2(half_lives) if half_lives > 0 else 1.0
        less = exp2(-min(half_lives, 1000.0))  # 2 ** -1000: counts vanish, and floats do not go much lower
        for node in (self._root, *self._all()):
            node.weight *= less
            node.hits *= less
        self._scale_from = now
        return 1.0

    def _grow(self, parent: _Node, edge: bytes, origin: Origin) -> _Node:
        node = _Node(edge, parent, origin)
        if parent.children is None:
            parent.children = {}
            self._no_leaf(parent)
        parent.children[edge[:KEY_BYTES]] = node
        self._leaf(node)
        self._nodes += 1
        self._bytes += NODE_BYTES + len(edge)
        return node

    def _split(self, lower: _Node, at: int) -> _Node:
        parent = lower.parent
        assert parent is not None
        assert parent.children is not None
        upper = _Node(lower.edge[:at], parent, lower.origin)
        upper.weight, upper.seen_at, upper.head = lower.weight, lower.seen_at, lower.head
        # hits are prefixes: they fill the first part first
        upper.hits = min(lower.hits, lower.weight * at)
        lower.hits -= upper.hits
        lower.edge, lower.parent, lower.head = lower.edge[at:], upper, b""
        parent.children[upper.edge[:KEY_BYTES]] = upper
        upper.children = {lower.edge[:KEY_BYTES]: lower}
        self._nodes += 1
        self._bytes += NODE_BYTES
        return upper

    def _keep_small(self) -> None:
        for _ in range(FORGOTTEN_AT_ONCE):
            if self._bytes <= self._most_bytes or not self._leaves:
                return
            leaves = self._leaves
            self._hand = hand = (self._hand + SAMPLED_LEAVES) % len(leaves)
            self._remove(min(leaves[hand : hand + SAMPLED_LEAVES], key=attrgetter("weight")))

    def _remove(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert parent.children is not None
        self._no_leaf(leaf)
        del parent.children[leaf.edge[:KEY_BYTES]]
        self._nodes -= 1
        self._bytes -= NODE_BYTES + len(leaf.edge)
        if not parent.children:
            parent.children = None
            if parent is not self._root:
                self._leaf(parent)

    def _leaf(self, node: _Node) -> None:
        node.slot = len(self._leaves)
        self._leaves.append(node)

    def _no_leaf(self, node: _Node) -> None:
        if node.slot < 0:
            return
        last = self._leaves.pop()
        if last is not node:
            self._leaves[node.slot] = last
            last.slot = node.slot
        node.slot = -1

    def _all(self) -> Iterator[_Node]:
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            if node.children:
                waiting.extend(node.children.values())
            if node is not self._root:
                yield node


def _unbranched(node: _Node) -> tuple[_Node, bytes, float, int]:
    """Follow a node until its requests diverge; return the last node, and the keys, hits and nodes on the way."""
    parts, hits = [node.edge], node.hits
    while node.children is not None and len(node.children) == 1:
        (child,) = node.children.values()
        if child.weight < ALIKE * node.weight:
            break
        parts.append(child.edge)
        hits += child.hits
        node = child
    return node, b"".join(parts), hits, len(parts)


def _common(one: bytes, other: bytes) -> int:
    """Return the length in bytes of the common leading keys; the first key is known to be common."""
    low, high = 1, min(len(one), len(other)) // KEY_BYTES
    while low < high:  # keys are chained: after the first difference all differ
        middle = (low + high + 1) // 2
        if one[(middle - 1) * KEY_BYTES : middle * KEY_BYTES] == other[(middle - 1) * KEY_BYTES : middle * KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * KEY_BYTES

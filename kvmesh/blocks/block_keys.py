"""Our own block keys: the same tokens give the same key, whatever the pod, its vLLM version or its hash seed.

This is the hot path of the picker (once per request) and of the indexer (once per event): no I/O, and no allocation per
block but the key itself. Both sides must agree on every byte; a change is a new schema version (`redis.keys`).

vLLM publishes a block's extra keys (LoRA adapter, multimodal inputs, cache salt, prompt embeddings) per block and
untagged, in this order: the LoRA name if `lora_name` is set, multimodal identifiers `(identifier, offset)` (a bare
string before 0.19), the salt (first block of a prompt only), embedding digests (bytes). The adapter and the salt go
into the root key; the rest is folded into its own block. Since 0.31 vLLM tags the same values in its own hashes:
`("lora", name, path)`, `("mm", identifier, offset)`, `("cache_salt", salt)` and `("prompt_embeds", digest)`. No version
publishes them in this form, but they are read, and mean the same as the plain ones.

`KnownBlockKeys` remembers earlier prompts: a known prefix costs a comparison instead of a hash per block. Answers equal
`block_keys`: a remembered chunk counts only after its tokens were compared byte by byte. Not thread-safe. A cold prompt
should cost Redis a few misses, a warm one a single round trip. Keys are chained, so a key at a checkpoint (block 0, 32,
64, 128, …) stands for the whole prefix up to there: a reader that has seen it knows how deep to ask.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import xxhash

KEY_BYTES = 8
TOKEN_BYTES = 4
NAME_LIMIT = 256  # characters of a salt, an adapter or an identifier that are kept as they are
NAME_DIGEST_BYTES = 16
FEW_BLOCKS = 64  # up to this many blocks are cut by a prepared layout: 2 kB each

RootKeys = Callable[[str | None, str | None], bytes]  # (LoRA name, cache salt) -> root key
# block size -> for each full block the extra bytes in its key (see `fold_features`), or None if no block has any
BlockExtras = Callable[[int], Sequence[bytes | None] | None]
CHUNK_BLOCKS = 64  # shorter: more comparisons; longer: more blocks after the last whole chunk
LIMIT_BYTES = 32 << 20  # tokens and keys: about 7 million tokens at 16 per block
ENTRY_BYTES = 400  # Python's overhead per entry
SECOND_CHANCES = 64  # used chunks spared in a row to make room for a new one: a pause of 20 us at most
FIRST_BATCH = 32  # blocks asked for first of an unknown prompt
GROWTH = 16  # factor from one batch to the next
LARGEST_BATCH = 2048  # Redis serves no other client meanwhile: about 0.7 ms
REMEMBERED = 16_384  # checkpoints, a few per prompt: about 3 MB
_CHECKPOINTS = (0, *(FIRST_BATCH << power for power in range(13)))


def root_key(*, hash_seed: str, model: str, lora: str | None = None, cache_salt: str | None = None) -> bytes:
    """Return the 8 bytes that precede the first block of a prompt.

    vLLM folds `cache_salt` into block 0 alone, which changes the whole chain; here it is part of the root, to the same
    effect. `None` and "" are equal for every field: vLLM refuses an empty salt, and an empty adapter name means none.
    An adapter or salt and its `held_name` give the same key.
    """
    digest = xxhash.xxh3_64(b"kvmesh-root-1")
    for part in (hash_seed, model, held_name(lora or ""), held_name(cache_salt or "")):
        text = part.encode()
        digest.update(struct.pack("<I", len(text)) + text)  # length first: ("a", "bc") is not ("ab", "c")
    return digest.digest()


def held_name(text: str) -> str:
    """Return the stored form of a foreign name: the name itself, or a digest if it is long.

    Pods and clients may choose megabytes. The digest is cryptographic. The stored form of a stored form is itself.
    """
    if len(text) <= NAME_LIMIT:
        return text
    return f"\0blake2b:{blake2b(text.encode(), digest_size=NAME_DIGEST_BYTES).hexdigest()}"


def held_digest(value: bytes) -> bytes:
    """Return the stored form of an embedding's digest, as `held_name` does for a text."""
    return value if len(value) <= NAME_LIMIT else blake2b(value, digest_size=NAME_DIGEST_BYTES).digest()


def block_keys(
    tokens: bytes | memoryview, *, block_size: int, parent: bytes, extra: Sequence[bytes | None] | None = None
) -> bytes:
    """Chain full blocks into keys: `key[i] = xxh3_64(key[i-1] + tokens of block i [+ extra[i]])`, `key[-1] = parent`.

    `tokens` is a buffer of little-endian uint32, `block_size` counts tokens, `parent` is a root or the key of the block
    before. The result is the concatenation of 8-byte keys; a trailing partial block has none. `extra` has one entry a
    full block (see `fold_features`). Raise ValueError for a block size below 1 or an `extra` that is too short.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 token, not {block_size}")
    step = block_size * TOKEN_BYTES
    count = len(tokens) // step
    # one C call cuts all blocks; slicing in the loop costs twice as much
    if count <= FEW_BLOCKS:  # the end of a chat, or a chunk: the prepared layout saves 15 of 60 us with cold caches
        blocks: tuple[bytes, ...] = _cutter(step, count)(tokens)
    else:
        blocks = struct.unpack(f"{step}s" * count, memoryview(tokens)[: count * step])
    digest = xxhash.xxh3_64_digest
    key = parent
    if extra is None:
        return b"".join([key := digest(key + block) for block in blocks])
    if len(extra) < count:
        raise ValueError(f"{len(extra)} extra entries for {count} blocks")
    return b"".join([key := digest(key + block + (more or b"")) for block, more in zip(blocks, extra, strict=False)])


@lru_cache(maxsize=256)
def _cutter(step: int, count: int) -> Callable[[bytes | memoryview], tuple[Any, ...]]:
    return struct.Struct(f"{step}s" * count).unpack_from


def split_keys(packed: bytes) -> tuple[bytes, ...]:
    """Cut a concatenation of 8-byte keys."""
    return struct.unpack(f"{KEY_BYTES}s" * (len(packed) // KEY_BYTES), packed)


class UnknownExtraKeyError(ValueError):
    """An entry of a kind that we cannot fold; indexing the block as plain would be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraKeys:
    """One event's extra keys, separated."""

    cache_salt: str | None
    folded: tuple[bytes | None, ...] | None  # one per block; None if no block has any


def separate_extra_keys(
    entries: Sequence[Sequence[Any] | None] | None, *, lora_name: str | None, starts_prompt: bool
) -> ExtraKeys:
    """Strip the adapter, take the salt out of the first block, fold the rest.

    Only the event's `lora_name` distinguishes an adapter from a salt (vllm#44701): a bare string in first place is the
    adapter if and only if `lora_name` equals it, and the last bare string left in a prompt's first block is the salt.
    So ("X",) is a salt, ("X",) with lora_name X is the adapter, ("X", "X") with it is both, each with a root key of its
    own. Up to vLLM 0.30 the engine's own hash of the first two is the same, so that it may serve one from the other's
    blocks; it announces them once, for the request that came first, and here they match only its kind.
    vLLM 0.17 to 0.18 writes multimodal identifiers as bare strings too: there an image in the very first block is taken
    for a salt, which costs a hit and invents none. Raise UnknownExtraKeyError.
    """
    salt: str | None = None
    folded: list[bytes | None] = []
    for index, entry in enumerate(entries or ()):
        parts = list(entry or ())
        if parts and lora_name and (parts[0] == lora_name or _tagged(parts[0], "lora", lora_name)):
            del parts[0]
        if index == 0 and starts_prompt:
            salt = _take_salt(parts)
        folded.append(fold_features(parts))
    return ExtraKeys(cache_salt=salt, folded=tuple(folded) if any(folded) else None)


def fold_features(features: Sequence[Any]) -> bytes | None:
    """Encode a block's features so that no two lists share an encoding; None if there are none.

    `(identifier, offset)`: multimodal item and its first token relative to the block's; `str`: an item without offset;
    `bytes`: a digest. The picker must build the same list. Raise UnknownExtraKeyError.
    """
    if not features:
        return None
    return b"".join(_fold(feature) for feature in features)


def _take_salt(parts: list[Any]) -> str | None:
    for index in range(len(parts) - 1, -1, -1):
        match parts[index]:
            case str() as salt:
                del parts[index]
                return salt
            case ["cache_salt", str() as salt]:
                del parts[index]
                return salt
    return None


def _tagged(part: Any, tag: str, value: str) -> bool:
    return isinstance(part, list | tuple) and tuple(part[:2]) == (tag, value)


def _fold(feature: Any) -> bytes:
    match feature:
        case ["mm", str() as identifier, int() as offset]:
            return _fold((identifier, offset))
        case ["prompt_embeds", bytes() as digest]:
            return _fold(digest)
        case [str() as identifier, int() as offset] if not isinstance(offset, bool) and abs(offset) < 1 << 63:
            text = held_name(identifier).encode()
            return b"m" + struct.pack("<Iq", len(text), offset) + text
        case str():
            text = held_name(feature).encode()
            return b"s" + struct.pack("<I", len(text)) + text
        case bytes():
            digest = held_digest(feature)
            return b"e" + struct.pack("<I", len(digest)) + digest
    raise UnknownExtraKeyError(f"extra key of type {type(feature).__name__}")


class _Chunk:
    """A chunk, its keys, and the chunk that last followed it: nearly always it also follows in the next prompt."""

    __slots__ = ("following", "keys", "tokens", "was_used")

    def __init__(self, tokens: bytes, keys: bytes) -> None:
        self.tokens = tokens  # empty once the chunk is forgotten
        self.keys = keys
        self.following: _Chunk | None = None
        self.was_used = False  # since it was last considered for eviction

    def forget(self) -> None:
        """Drop all contents: another chunk may still name this one as its successor."""
        self.tokens = self.keys = b""
        self.following = None


class KnownBlockKeys:
    """The recently used chunks, by the key before them and a digest of their tokens."""

    def __init__(self, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0  # approximate memory in use; never more than the limit
        # in order of arrival; a used chunk is kept for another round, so that a use costs only a mark
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()

    def keys(self, tokens: bytes, *, block_size: int, parent: bytes) -> bytes:
        """Return `block_keys(tokens, block_size=block_size, parent=parent)`."""
        prompt = PromptKeys(self, tokens, block_size=block_size, parent=parent)
        return prompt.reach(prompt.blocks)

    def find(self, tokens: bytes, *, parent: bytes) -> _Chunk | None:
        """Return the remembered chunk with these tokens after this key, or None."""
        found = self._chunks.get(parent + xxhash.xxh3_64_digest(tokens))
        # equal tokens of equal length are equally many blocks, hence blocks of one size
        return found if found is not None and found.tokens == tokens else None

    def remember(self, tokens: bytes, keys: bytes, *, parent: bytes) -> _Chunk:
        """Keep a chunk that `find` does not know; it may be forgotten at once if there is no room."""
        name = parent + xxhash.xxh3_64_digest(tokens)
        replaced = self._chunks.pop(name, None)
        if replaced is not None:
            self._drop(replaced)
        chunk = self._chunks[name] = _Chunk(tokens, keys)
        self.held_bytes += _size(chunk)
        chances = SECOND_CHANCES
        while self.held_bytes > self._limit_bytes:
            name, oldest = self._chunks.popitem(last=False)
            if oldest.was_used and chances:
                chances -= 1
                oldest.was_used = False
                self._chunks[name] = oldest
            else:
                self._drop(oldest)
        return chunk

    def _drop(self, chunk: _Chunk) -> None:
        self.held_bytes -= _size(chunk)
        chunk.forget()


class PromptKeys:
    """The keys of one prompt, computed only as far as requested. Raise ValueError for a block size below 1.

    `blocks`: how many of the tokens' leading blocks to use, so that the tokens need not be cut; all by default.
    """

    __slots__ = ("_block_size", "_known", "_last", "_packed", "_parent", "_pieces", "_reached", "_tokens", "blocks")

    def __init__(
        self, known: KnownBlockKeys, tokens: bytes, *, block_size: int, parent: bytes, blocks: int | None = None
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, not {block_size}")
        self.blocks = len(tokens) // (block_size * TOKEN_BYTES) if blocks is None else blocks
        self._known = known
        self._tokens = tokens
        self._block_size = block_size
        self._parent = parent  # of the next block
        self._last: _Chunk | None = None  # the one before the next block
        self._packed = b""
        self._pieces: list[bytes] = []  # not in `_packed` yet
        self._reached = 0  # blocks

    def reach(self, blocks: int) -> bytes:
        """Return the packed keys of at least the first `blocks` blocks, or of all if there are fewer."""
        least = min(blocks, self.blocks)
        while self._reached < least:
            self._pass_known()
            if self._reached < least:
                self._compute()
        return self._join() if self._pieces else self._packed

    def reach_unknown(self) -> bytes:
        """Return the packed keys of the remembered beginning, and of one chunk more."""
        self._pass_known()
        if self._reached < self.blocks:
            self._compute()
        return self._join() if self._pieces else self._packed

    def _join(self) -> bytes:
        self._packed = b"".join((self._packed, *self._pieces))
        self._pieces.clear()
        return self._packed

    def _pass_known(self) -> None:
        """Advance over the remembered chunks.

        Nearly always each is the successor of last time: comparing in place costs a third of cutting, hashing and
        looking it up (8,000 tokens, cold caches).
        """
        tokens, known, last = self._tokens, self._known, self._last
        width = self._block_size * TOKEN_BYTES
        length = CHUNK_BLOCKS * width
        at = self._reached * width
        end = self.blocks * width - length
        while at <= end:
            chunk = last.following if last is not None else None
            if chunk is None or not chunk.tokens or not tokens.startswith(chunk.tokens, at):
                chunk = known.find(tokens[at : at + length], parent=self._parent)
                if chunk is None:
                    break
                if last is not None and last.tokens:
                    last.following = chunk
            chunk.was_used = True
            self._pieces.append(chunk.keys)
            self._parent = chunk.keys[-KEY_BYTES:]
            last = chunk
            at += length
        self._last = last
        self._reached = at // width

    def _compute(self) -> None:
        """Add the keys of one chunk that is not remembered."""
        width = self._block_size * TOKEN_BYTES
        at = self._reached * width
        count = min(CHUNK_BLOCKS, self.blocks - self._reached)
        tokens = self._tokens[at : at + count * width]
        keys = block_keys(tokens, block_size=self._block_size, parent=self._parent)
        if count == CHUNK_BLOCKS:  # an incomplete last chunk is not kept: a longer prompt continues it
            before, self._last = self._last, self._known.remember(tokens, keys, parent=self._parent)
            if before is not None and before.tokens:
                before.following = self._last
        self._pieces.append(keys)
        self._parent = keys[-KEY_BYTES:]
        self._reached += count


def _size(chunk: _Chunk) -> int:
    return len(chunk.tokens) + len(chunk.keys) + ENTRY_BYTES


class DepthHints:
    """The lengths of the last prompts through each checkpoint; the oldest are evicted first."""

    def __init__(self, *, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._depths: dict[bytes, int] = {}  # block key at a checkpoint -> blocks of the last prompt through it

    def first_batch(self, keys: bytes, *, blocks: int) -> int:
        """Return how many of a prompt's blocks to ask for first; `keys` may end before the prompt does."""
        beyond = _CHECKPOINTS[-1]
        for checkpoint in _within(blocks):
            depth = self._depths.get(keys[checkpoint * KEY_BYTES : (checkpoint + 1) * KEY_BYTES])
            if depth is not None:
                # prompts that continue alike would be known at the next checkpoint, too
                return min(max(min(depth, beyond) + FIRST_BATCH, FIRST_BATCH), LARGEST_BATCH)
            beyond = checkpoint
        return FIRST_BATCH

    def learn(self, keys: bytes, *, matched: int) -> None:
        """Note a looked-up prompt; if its beginning is held, the pod that serves it will soon hold all of it."""
        if not matched:
            return
        blocks = len(keys) // KEY_BYTES
        for checkpoint in _within(blocks):
            key = keys[checkpoint * KEY_BYTES : (checkpoint + 1) * KEY_BYTES]
            self._depths.pop(key, None)  # the latest goes last
            self._depths[key] = blocks
        while len(self._depths) > self._limit:
            del self._depths[next(iter(self._depths))]


def next_batch(asked: int) -> int:
    """Return how many blocks to ask for after a batch of `asked` blocks that was held completely."""
    return min(max(asked, FIRST_BATCH) * GROWTH, LARGEST_BATCH)


@lru_cache(maxsize=4_096)  # lengths of prompts recur
def _within(blocks: int) -> tuple[int, ...]:
    return tuple([checkpoint for checkpoint in reversed(_CHECKPOINTS) if checkpoint < blocks])

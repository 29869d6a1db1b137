"""Keys of a prompt's text in chunks: a prediction of what shares a prefix where token ids are unknown.

Called by `prompts.prompt_tokens`. Two prompts share as many leading keys as they share leading chunks, also when one
is a later turn of the other's conversation. The keys never go to Redis: they say nothing about an engine's blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import xxhash

from extproc.requests.request import ChatPrompt, Prompt, TextPrompt
from kvmesh.blocks.block_keys import block_keys

CHUNK_BYTES = 256
BYTES_PER_TOKEN = 4  # of English text, roughly; fewer tokens are better known than many, so this errs on the low side
CHUNK_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN
MEDIA_TOKENS = 1_000  # an image of a megapixel or half a minute of sound, roughly
MAX_TEXT_BYTES = 1_024 * CHUNK_BYTES  # what follows changes no decision
MAX_PIECES = 50_000  # roles, texts, calls: about 50 ms; more than any conversation has
ROLE_MARK, PART_MARK, MEDIA_MARK = "\x01", "\x02", "\x03"  # no text that people write has them


class ChunkedText(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's keys, and how long it is thought to be."""

    keys: bytes  # packed 8-byte keys, one for each full chunk, at most 1,024
    estimated_tokens: int


def chunk_text(prompt: Prompt, *, root: bytes) -> ChunkedText:
    """Chain the chunks of a prompt's canonical text; `root` keeps models, adapters and salts apart."""
    text, tokens = canonical_text(prompt)
    keys = block_keys(memoryview(text)[:MAX_TEXT_BYTES], block_size=CHUNK_BYTES // 4, parent=root)
    return ChunkedText(keys=keys, estimated_tokens=tokens)


def estimated_tokens(prompts: Iterable[Prompt]) -> int:
    """Return about how many tokens these prompts have."""
    return sum(canonical_text(prompt)[1] for prompt in prompts)


def canonical_text(prompt: Prompt) -> tuple[bytes, int]:
    """Return the bytes that are chunked, and about how many tokens the whole prompt has.

    Tools come before messages, as in most templates; each message is its role and its content. A later turn adds bytes
    at the end and changes none before. Media count by a digest of what the client sent.
    """
    if isinstance(prompt, TextPrompt):
        return _utf8(prompt.text[:MAX_TEXT_BYTES]), -(-len(prompt.text) // BYTES_PER_TOKEN)
    if not isinstance(prompt, ChatPrompt):
        return prompt.token_bytes, len(prompt.token_bytes) // 4
    pieces: list[str] = []
    kept = length = media = 0
    for piece in islice(_pieces(prompt), MAX_PIECES):
        length += len(piece)
        media += piece.startswith(MEDIA_MARK)
        if kept < MAX_TEXT_BYTES:
            pieces.append(piece[:MAX_TEXT_BYTES])
            kept += len(pieces[-1])
    return _utf8("".join(pieces)), -(-length // BYTES_PER_TOKEN) + media * MEDIA_TOKENS


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _pieces(prompt: ChatPrompt) -> Iterator[str]:
    if prompt.tools:
        yield _json(prompt.tools)
    if prompt.documents:
        yield _json(prompt.documents)
    for message in prompt.messages:
        yield from _message(message)


def _message(message: Any) -> Iterator[str]:
    if not isinstance(message, dict):
        yield ROLE_MARK + _json(message)
        return
    content = message.get("content")
    yield f"{ROLE_MARK}{message.get('role')}{PART_MARK}"
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from _parts(content)
    if calls := message.get("tool_calls"):
        yield PART_MARK + _json(calls)


def _parts(parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict) and isinstance(text := part.get("text"), str):
            yield text
        else:
            yield MEDIA_MARK + xxhash.xxh3_64_hexdigest(_json(part).encode())


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, RecursionError):  # half of a surrogate pair, or nested to hurt
        return repr(type(value))

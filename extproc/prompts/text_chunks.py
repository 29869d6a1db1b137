"""Keys of a prompt's text chunks: they predict shared prefixes where token ids are unknown.

Two prompts share as many leading keys as leading chunks, also if one is a later turn of the other's conversation. The
keys never go to Redis: they say nothing about an engine's blocks.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
import xxhash

from extproc.requests.json_body import has_too_many_parts
from extproc.requests.request import ChatPrompt, PairPrompt, Prompt, TextPrompt
from kvmesh.blocks.block_keys import block_keys

CHUNK_BYTES = 256
BYTES_PER_TOKEN = 4  # roughly, of English text; errs on the side of fewer tokens
CHUNK_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN
MEDIA_TOKENS = 1_000  # roughly, an image of a megapixel or half a minute of audio
MAX_TEXT_BYTES = 1_024 * CHUNK_BYTES  # text beyond it changes no decision
MAX_PIECES = 50_000  # roles, texts, calls: about 50 ms; more than any conversation has
ROLE_MARK, PART_MARK, MEDIA_MARK = "\x01", "\x02", "\x03"  # do not occur in normal text


def chunk_text(prompt: Prompt, *, root: bytes) -> tuple[bytes, int]:
    """Return packed 8-byte keys (one per full chunk, at most 1,024) and the prompt's estimated number of tokens.

    The keys chain the chunks of the canonical text; `root` keeps models, adapters and salts apart.
    """
    text, tokens = canonical_text(prompt)
    return block_keys(memoryview(text)[:MAX_TEXT_BYTES], block_size=CHUNK_BYTES // 4, parent=root), tokens


def estimated_tokens(prompts: Iterable[Prompt]) -> int:
    """Return the prompts' estimated number of tokens."""
    return sum(canonical_text(prompt)[1] for prompt in prompts)


def canonical_text(prompt: Prompt) -> tuple[bytes, int]:
    """Return the bytes to chunk, and the whole prompt's estimated number of tokens.

    Tools come before messages, as in most templates; each message is its role and its content. A later turn only
    appends bytes. A media item is a digest of the client's JSON for it.
    """
    if isinstance(prompt, TextPrompt):
        return _utf8(prompt.text[:MAX_TEXT_BYTES]), -(-len(prompt.text) // BYTES_PER_TOKEN)
    if isinstance(prompt, PairPrompt):
        text = f"{prompt.query}{PART_MARK}{prompt.document}"
        return _utf8(text[:MAX_TEXT_BYTES]), -(-len(text) // BYTES_PER_TOKEN)
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
    for declared in (prompt.tools, prompt.documents):
        if declared:
            yield _json(declared)
    for message in prompt.messages:
        if not isinstance(message, dict):
            yield ROLE_MARK + _json(message)
            continue
        yield f"{ROLE_MARK}{message.get('role')}{PART_MARK}"
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from map(_part, content)
        if calls := message.get("tool_calls"):
            yield PART_MARK + _json(calls)


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else MEDIA_MARK + xxhash.xxh3_64_hexdigest(_json(part).encode())


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, RecursionError):  # a lone surrogate, or malicious nesting
        return repr(type(value))


# --- the text of a body that was not parsed for tokens: media, unknown fields, an API that only vLLM understands ------


class _Texts(msgspec.Struct):
    messages: Any = None
    system: Any = None  # Anthropic's messages
    instructions: Any = None  # responses
    input: Any = None  # responses, embeddings
    tools: Any = None
    prompt: Any = None


_DECODER = msgspec.json.Decoder(_Texts)


def prompt_in_body(body: bytes) -> Prompt | None:
    """Return the prompt, as far as it is text and JSON, or None without a prompt or if parsing would take too long.

    Lenient on purpose: the result is only compared with earlier ones, so nothing needs validation.
    """
    if has_too_many_parts(body):
        return None
    try:
        texts = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    messages = _messages(texts)
    if messages:
        tools = tuple(texts.tools) if isinstance(texts.tools, list) else None
        return ChatPrompt(messages=messages, tools=tools)
    for given in (texts.prompt, texts.input):
        first = given[0] if isinstance(given, list) and given else given
        if isinstance(first, str):
            return TextPrompt(text=first)
    return None


def _messages(texts: _Texts) -> tuple[Any, ...]:
    system = texts.system if texts.system is not None else texts.instructions
    first = [{"role": "system", "content": system}] if isinstance(system, str | list) and system else []
    for turns in (texts.messages, texts.input):
        if isinstance(turns, list) and any(isinstance(turn, dict) for turn in turns):
            return (*first, *turns)
    if first and isinstance(texts.input, str):
        return (*first, {"role": "user", "content": texts.input})
    return ()

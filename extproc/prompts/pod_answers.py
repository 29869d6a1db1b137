"""What pods answer to questions about tokens; unknown fields are skipped unread. Pure.

The format of renders is `GenerateRequest` of vLLM 0.32 (vllm/entrypoints/scale_out/token_in_token_out/protocol.py);
completions answer a list, one for each prompt. That of /tokenize is `TokenizeResponse`.
"""

import msgspec

from extproc.prompts.token_ids import TOKEN_BYTES, Feature, TokenizedPrompt
from extproc.requests.request import TokenPrompt
from kvmesh.pods.page_steps import Steps

MAX_PARTS = 1 << 14  # objects in an answer: prompts, and places of media
STEP_BYTES = 1 << 16  # of token ids read between two turns of the event loop
MAX_IDENTIFIER_CHARACTERS = 256  # of a medium: vLLM's are 64 hex digits, clients may give others
MAX_COVER = 4  # times, that media may cover a prompt: sound and video share their places


class RenderAnswerError(ValueError):
    """The answer is not what vLLM's render endpoint gives."""


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Placeholder]] = {}


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw  # a list of numbers
    features: _Features | None = None


class _Tokenized(msgspec.Struct):
    tokens: msgspec.Raw  # a list of numbers


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error | None = None
    message: str = ""  # older versions have no `error` around it


_ANSWER = msgspec.json.Decoder(_Rendered | list[_Rendered])
_TOKENIZED = msgspec.json.Decoder(_Tokenized)
_REFUSAL = msgspec.json.Decoder(_Refusal)
_IDS = msgspec.json.Decoder(list[int])


def read_render_answer(body: bytes) -> Steps[tuple[TokenizedPrompt, ...]]:
    """Return the prompts of a 200 answer. Raise RenderAnswerError."""
    if body.count(b"{") > MAX_PARTS:
        raise RenderAnswerError(f"its answer has more than {MAX_PARTS} parts")
    try:
        answer = _ANSWER.decode(body)
        yield
        prompts: list[TokenizedPrompt] = []
        for rendered in answer if isinstance(answer, list) else [answer]:
            tokens = yield from _packed(bytes(rendered.token_ids))
            features = () if rendered.features is None else _features(rendered.features, len(tokens) // TOKEN_BYTES)
            prompts.append(TokenizedPrompt(tokens=tokens, features=features))
        return tuple(prompts)
    except RenderAnswerError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        raise RenderAnswerError(f"not an answer of vLLM's render endpoint: {error}") from error


def read_tokenize_answer(body: bytes) -> Steps[tuple[TokenizedPrompt, ...]]:
    """Return the one prompt of a 200 answer of /tokenize. Raise RenderAnswerError."""
    try:
        answer = _TOKENIZED.decode(body)
        yield
        tokens = yield from _packed(bytes(answer.tokens))
        return (TokenizedPrompt(tokens=tokens),)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        raise RenderAnswerError(f"not an answer of vLLM's tokenize endpoint: {error}") from error


def read_refusal(body: bytes) -> str:
    """Return the message of a 4xx or 5xx answer, shortened; "" if it has none."""
    try:
        refusal = _REFUSAL.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return (refusal.error.message if refusal.error is not None else refusal.message)[:200]


def _packed(ids: bytes) -> Steps[bytes]:
    """Return a list of token ids as little-endian uint32, read piece by piece."""
    if not ids.startswith(b"[") or len(ids) <= STEP_BYTES:
        return TokenPrompt.of(_IDS.decode(ids)).token_bytes
    packed: list[bytes] = []
    begin, size = 1, len(ids) - 1  # between the brackets
    while begin < size:
        end = ids.find(b",", begin + STEP_BYTES, size)
        end = size if end < 0 else end
        packed.append(TokenPrompt.of(_IDS.decode(b"[%b]" % ids[begin:end])).token_bytes)
        begin = end + 1
        yield
    return b"".join(packed)


def _features(features: _Features, tokens: int) -> tuple[Feature, ...]:
    """Return the media of a prompt of so many tokens, in the order of their places, as the engine hashes them."""
    found: list[Feature] = []
    covered = 0
    for kind, identifiers in features.mm_hashes.items():
        places = features.mm_placeholders.get(kind, [])
        if len(places) != len(identifiers):
            raise RenderAnswerError(f"{len(identifiers)} hashes but {len(places)} places of kind {kind[:40]!r}")
        for identifier, place in zip(identifiers, places, strict=True):
            if place.offset < 0 or place.length < 0 or place.offset + place.length > tokens:
                raise RenderAnswerError(f"an item of kind {kind[:40]!r} stands beyond the prompt's {tokens} tokens")
            if len(identifier) > MAX_IDENTIFIER_CHARACTERS:
                raise RenderAnswerError(f"an item has a name of more than {MAX_IDENTIFIER_CHARACTERS} characters")
            covered += place.length
            found.append(Feature(identifier=identifier, first_token=place.offset, length=place.length))
    if covered > MAX_COVER * tokens:
        raise RenderAnswerError("its media cover the prompt again and again")
    return tuple(sorted(found, key=lambda feature: feature.first_token))

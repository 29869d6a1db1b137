"""Read what a vLLM pod answers to POST …/render: token ids, and where images and the like stand in them.

Called by `prompts.pod_render`. Format: `GenerateRequest` of vLLM 0.32 (vllm/entrypoints/scale_out/
token_in_token_out/protocol.py); completions answer a list, one a prompt. Unknown fields are skipped unread.
"""

import msgspec

from extproc.prompts.token_ids import Feature, TokenizedPrompt
from extproc.requests.request import TokenPrompt


class RenderAnswerError(ValueError):
    """The answer is not what vLLM's render endpoint gives."""


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Placeholder]] = {}


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error | None = None
    message: str = ""  # older versions have no `error` around it


_ANSWER = msgspec.json.Decoder(_Rendered | list[_Rendered])
_REFUSAL = msgspec.json.Decoder(_Refusal)


def read_render_answer(body: bytes) -> tuple[TokenizedPrompt, ...]:
    """Return the prompts of a 200 answer. Raise RenderAnswerError."""
    try:
        answer = _ANSWER.decode(body)
        return tuple(_prompt(rendered) for rendered in (answer if isinstance(answer, list) else [answer]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        raise RenderAnswerError(f"not an answer of vLLM's render endpoint: {error}") from error


def read_refusal(body: bytes) -> str:
    """Return the message of a 4xx or 5xx answer, shortened; "" if it has none."""
    try:
        refusal = _REFUSAL.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return (refusal.error.message if refusal.error is not None else refusal.message)[:200]


def _prompt(rendered: _Rendered) -> TokenizedPrompt:
    tokens = TokenPrompt.of(rendered.token_ids).token_bytes
    if rendered.features is None:
        return TokenizedPrompt(tokens=tokens)
    return TokenizedPrompt(tokens=tokens, features=_features(rendered.features))


def _features(features: _Features) -> tuple[Feature, ...]:
    found: list[Feature] = []
    for kind, identifiers in features.mm_hashes.items():
        places = features.mm_placeholders.get(kind, [])
        if len(places) != len(identifiers):
            raise RenderAnswerError(f"{len(identifiers)} hashes but {len(places)} places of kind {kind!r}")
        for identifier, place in zip(identifiers, places, strict=True):
            if place.offset < 0 or place.length < 0:
                raise RenderAnswerError(f"an item of kind {kind!r} stands at {place.offset}+{place.length}")
            found.append(Feature(identifier=identifier, first_token=place.offset, length=place.length))
    # the engine hashes them in the order of their places
    return tuple(sorted(found, key=lambda feature: feature.first_token))

"""Tokenizes the probes as the picker would, and sets them beside what a pod's /tokenize says. Judges nothing."""

import asyncio
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from extproc.doctor.facts import TokenComparison
from extproc.doctor.http_page import Page
from extproc.doctor.probes import PROBES, Probe
from extproc.errors import PickError, PromptTokensError
from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.prompt_tokens import load_tokenizer
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request

SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTokens:
    """What the picker's settings make of the probes for one model; a text is why there are no tokens."""

    model: str
    by_probe: Mapping[str, tuple[int, ...] | str]


async def own_tokens(
    models: Sequence[ServedModel], *, loaded: Mapping[str, ModelTokenizer] | None = None
) -> dict[str, OwnTokens]:
    """Tokenize every probe for each model that has a tokenizer folder; in a thread, because loading one takes long."""
    tokenized = [model for model in models if model.tokens_from is TokensFrom.TOKENIZER]
    return {
        model.name: await asyncio.to_thread(_of_model, model, (loaded or {}).get(model.name)) for model in tokenized
    }


def _of_model(model: ServedModel, tokenizer: ModelTokenizer | None) -> OwnTokens:
    try:
        tokenizer = tokenizer or load_tokenizer(model)
    except PromptTokensError as error:
        return OwnTokens(model=model.name, by_probe={probe.name: str(error) for probe in PROBES})
    return OwnTokens(
        model=model.name, by_probe={probe.name: _of_probe(probe, model.name, tokenizer) for probe in PROBES}
    )


def _of_probe(probe: Probe, model: str, tokenizer: ModelTokenizer) -> tuple[int, ...] | str:
    try:
        (buffer,) = tokenizer.token_buffers(parse_request(path=probe.path, body=probe.body(model)))
    except (PromptTokensError, PickError) as error:
        return str(error)
    ids = array("I", buffer)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def compare(probe: Probe, *, own: OwnTokens, answer: Page) -> TokenComparison:
    """Set one probe's own tokens beside the answer of POST /tokenize."""
    ours, theirs = own.by_probe[probe.name], _their_tokens(answer)
    return TokenComparison(
        model=own.model,
        probe=probe.name,
        is_chat=probe.is_chat,
        ours=ours if isinstance(ours, tuple) else None,
        theirs=theirs if isinstance(theirs, tuple) else None,
        our_problem=ours if isinstance(ours, str) else "",
        their_problem=theirs if isinstance(theirs, str) else "",
        refused=answer.status == 400,
    )


def _their_tokens(answer: Page) -> tuple[int, ...] | str:
    if answer.status != 200:
        said = answer.body[:SHOWN_CHARACTERS].decode("utf-8", "replace")
        return answer.problem or f"/tokenize answers {answer.status}: {said}"
    content = answer.json()
    tokens = content.get("tokens") if isinstance(content, Mapping) else None
    if not isinstance(tokens, list) or not all(type(each) is int for each in tokens):
        return "/tokenize answers no list of tokens"
    return tuple(tokens)

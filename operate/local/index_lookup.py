"""`kvmesh index lookup`: reads from the index which endpoints hold a prompt's prefix.

Uses the picker's tokens, block keys and rules, but no load, no in-flight requests and no deadline. Read-only.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.errors import ConfigError, KvmeshError, MalformedRequestError, PrefixIndexUnavailableError
from extproc.requests.openai import parse_request
from extproc.requests.request import InferenceRequest, TokenPrompt
from kvmesh.blocks.block_keys import root_key
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.index.prefix_match import PrefixLookup
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.plain_text import printable

MAX_PROMPTS = 16  # per request; the picker's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokenIds:
    """The prompts of a file as token ids."""

    buffers: tuple[bytes, ...]  # little-endian uint32
    cache_salt: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointHolding:
    """One endpoint's share of a prompt; `-o json` uses these field names."""

    endpoint: str
    matched_blocks: int
    matched_tokens: int
    share: float  # of the prompt's tokens, 0..1
    block_size: int | None  # tokens
    tiers: Mapping[str, int]  # tier -> matched blocks, each counted in its best tier
    state: str
    reason: str
    held_back: str = ""  # why fewer blocks match than full attention holds (hybrid models)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHolding:
    """All endpoints known to the index with their match for one prompt, longest match first."""

    tokens: int
    endpoints: tuple[EndpointHolding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupReport:
    """The result for all prompts of a file."""

    model: str
    prompts: tuple[PromptHolding, ...]
    indexer_alive: bool


def read_token_ids(content: bytes, *, model: str, tokenizer: Path | None) -> PromptTokenIds:
    """Return the tokens of a request body or of a JSON list of token ids (which needs no tokenizer).

    Raise ConfigError if the file is wrong or the tokenizer is missing.
    """
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"the file is no JSON: {error}") from None
    if isinstance(value, list):
        return PromptTokenIds(buffers=(_packed(value),), cache_salt=None)
    if not isinstance(value, dict):
        raise ConfigError("the file is neither a request body (an object) nor a list of token ids")
    request = _request(value, content, model=model)
    return PromptTokenIds(buffers=_tokenized(request, tokenizer), cache_salt=request.cache_salt)


def _packed(ids: Sequence[Any]) -> bytes:
    if not all(type(each) is int and 0 <= each < 1 << 32 for each in ids):
        raise ConfigError("a list must hold token ids: integers from 0 to 4294967295")
    return TokenPrompt.of(ids).token_bytes


def _request(value: Mapping[str, Any], content: bytes, *, model: str) -> InferenceRequest:
    path = "/v1/completions" if "prompt" in value and "messages" not in value else "/v1/chat/completions"
    try:
        request = parse_request(path=path, body=content)
    except MalformedRequestError as error:
        raise ConfigError(f"the file is no request body: {error}") from None
    if request.model not in {None, model}:
        raise ConfigError(f"the body asks for the model {request.model!r}, and --model is {model!r}")
    if not request.prompts:
        raise ConfigError(f"the prompt's tokens cannot be known: {request.unsupported_reason or 'there is none'}")
    return request


def _tokenized(request: InferenceRequest, tokenizer: Path | None) -> tuple[bytes, ...]:
    from extproc.prompts.tokenizer import ModelTokenizer  # noqa: PLC0415  token ids need no tokenizer

    if tokenizer is None:
        raise ConfigError("a request body needs --tokenizer, the folder of the model's tokenizer.json")
    return ModelTokenizer.load(tokenizer).token_buffers(request, limit=MAX_PROMPTS)


async def look_up(
    url: str, prompts: PromptTokenIds, *, model: str, hash_seed: str, timeout_seconds: float
) -> LookupReport:
    """Query the index. Raise ConfigError for a bad address, PrefixIndexUnavailableError if Redis does not answer."""
    root = root_key(hash_seed=hash_seed, model=model, cache_salt=prompts.cache_salt)
    try:
        reader = PrefixIndexReader(url=url, hash_seed=hash_seed)
    except RedisUrlError as error:
        raise ConfigError(str(error)) from error
    try:
        async with asyncio.timeout(timeout_seconds):
            found = [await reader.lookup(tokens, root=root) for tokens in prompts.buffers]
    except IndexUnavailableError as error:
        raise PrefixIndexUnavailableError(str(error)) from error
    except TimeoutError:
        raise PrefixIndexUnavailableError(f"Redis did not answer within {timeout_seconds:g} s") from None
    finally:
        await reader.close()
    if not found:
        raise KvmeshError("the file has no prompt")
    return LookupReport(
        model=model,
        prompts=tuple(
            _holding(lookup, tokens=len(tokens) // 4) for lookup, tokens in zip(found, prompts.buffers, strict=True)
        ),
        indexer_alive=found[0].indexer_alive,
    )


def _holding(lookup: PrefixLookup, *, tokens: int) -> PromptHolding:
    endpoints = []
    for endpoint, cache in lookup.endpoints.items():
        blocks, size = lookup.matched_blocks.get(endpoint, 0), lookup.block_size.get(endpoint)
        matched = blocks * (size or 0)
        endpoints.append(
            EndpointHolding(
                endpoint=endpoint,
                matched_blocks=blocks,
                matched_tokens=matched,
                share=round(matched / tokens, 4) if tokens else 0.0,
                block_size=size,
                tiers=dict(lookup.tiers.get(endpoint, {})),
                state=cache.state.value,
                reason=cache.reason,
                held_back=lookup.held_back[endpoint].words if endpoint in lookup.held_back else "",
            )
        )
    endpoints.sort(key=lambda holding: (-holding.matched_tokens, holding.endpoint))
    return PromptHolding(tokens=tokens, endpoints=tuple(endpoints))


def render(report: LookupReport, *, console: Console) -> None:
    """Print the report as tables. Its content is printed as plain text, never as markup."""
    if not report.indexer_alive:
        _say(console, "No indexer is alive: nothing keeps the index true.")
    for number, prompt in enumerate(report.prompts, start=1):
        name = f"prompt {number}" if len(report.prompts) > 1 else "prompt"
        _say(console, f"{name}: {prompt.tokens:,} tokens")
        if not prompt.endpoints:
            _say(console, "The index is empty: no indexer has registered a source yet.")
            continue
        console.print(_table(prompt))
        if not any(holding.matched_blocks for holding in prompt.endpoints):
            _say(console, f"Nobody holds its beginning, as the model {report.model} with this hash seed.")
        for holding in prompt.endpoints:
            if holding.held_back:
                _say(console, f"{holding.endpoint}: {holding.held_back}")
            if holding.reason:
                _say(console, f"{holding.endpoint} is {holding.state}: {holding.reason}")


def _table(prompt: PromptHolding) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("endpoint", overflow="fold")
    for heading in ("blocks", "tokens", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("tiers")
    table.add_column("state", no_wrap=True)
    for holding in prompt.endpoints:
        cells = [
            holding.endpoint,
            f"{holding.matched_blocks:,}",
            f"{holding.matched_tokens:,}",
            f"{holding.share:.0%}",
            ", ".join(f"{tier} {blocks:,}" for tier, blocks in holding.tiers.items()) or "-",
            holding.state,
        ]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _say(console: Console, line: str) -> None:
    console.print(Text(printable(line)))

"""Checks whether a model's folder yields its pods' tokens: each pod tokenizes a set of probes once.

Probes are prompts on which this process's tokens and a pod's most often differ.

A folder that differs from most of the compared pods is distrusted: the pods are asked instead. If no more than half of
them differ, some pods may be wrong, so the folder stays in use; the verdict is DIFFERS in both cases.
"""

import logging
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from extproc.errors import PickError, PromptTokensError
from extproc.models.models import ServedModel
from extproc.prompts.pod_render import PodRender, RenderUnavailableError
from extproc.prompts.retries import Retries
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request

log = logging.getLogger(__name__)

SAID_EVERY_SECONDS = 60.0  # log interval of a model whose verdict changes
SHOWN_PODS = 3
Tokens = tuple[int, ...] | str  # a text says why there are no tokens

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place: °C, wind & rain",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
UNICODE = "Straße, İstanbul, e\u0301 vs é, 日本語, 한국어, العربية, 👩‍👩‍👧 🏳️‍🌈\u00a0\u2003end"
WHITESPACE = "  two  spaces\n\n\n\ttab\r\nline   \n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One prompt, as a client sends it; the pod's /tokenize takes the same fields."""

    name: str
    path: str
    fields: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether the probe uses a chat template."""
        return "messages" in self.fields

    def body(self, model: str) -> bytes:
        """Return the request body for a model."""
        return msgspec.json.encode({"model": model, **self.fields})


def difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    """Return where the tokens of a folder and a pod first differ."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, pair in pairs if pair[0] != pair[1]), None)
    where = f"token {at} differs" if at is not None else "one begins like the other"
    return f"{len(ours)} here, {len(theirs)} there, {where}"


def _chat(name: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Probe:
    return Probe(name=name, path="/v1/chat/completions", fields={"messages": messages, **fields})


def _completion(name: str, prompt: str) -> Probe:
    return Probe(name=name, path="/v1/completions", fields={"prompt": prompt})


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


PROBES = (
    _completion("completion", "The quick brown fox jumps over the lazy dog. 1234567890 x²+y²≠z²"),
    _completion("completion with Unicode", UNICODE),
    _completion("completion with whitespace", WHITESPACE),
    _chat("chat", [_says("user", "What is a block pool?")]),
    _chat(
        "chat with system prompt and history",
        [
            _says("system", "You are a terse assistant. " * 8),
            _says("user", "Name a colour."),
            _says("assistant", "Blue."),
            _says("user", "Another one, please."),
        ],
    ),
    _chat("chat with Unicode", [_says("user", UNICODE + WHITESPACE)]),
    _chat("chat with tools", [_says("user", "Will it rain in Paris?")], tools=TOOLS),
)


def token_ids(buffer: bytes) -> tuple[int, ...]:
    """Return the numbers in a buffer of little-endian uint32."""
    return struct.unpack(f"<{len(buffer) // 4}I", buffer)


class TokenVerdict(StrEnum):
    """How a folder's tokens compare with the pods'."""

    EXACT = "exact"  # as on every compared pod
    UNVERIFIED = "unverified"  # no pod compared yet
    DIFFERS = "differs"  # from at least one pod's


class TokenState(NamedTuple):
    """A verdict and its reason."""

    verdict: TokenVerdict
    why: str


@dataclass(slots=True)
class _Asked:
    difference: str | None = None  # "" if equal; None if the pod could not be asked
    problem: str = ""
    retries: Retries = field(default_factory=Retries)


@dataclass(slots=True)
class _Folder:
    tokenizer: ModelTokenizer
    pods: dict[str, _Asked] = field(default_factory=dict)
    said: TokenVerdict | None = None
    said_at: float = float("-inf")


class TokenChecks:
    """The token checks of one pool."""

    def __init__(
        self, *, render: PodRender, doubts: dict[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`doubts` is kept up to date: why each distrusted folder is, by model."""
        self._render = render
        self._doubts = doubts
        self._clock = clock
        self._folders: dict[str, _Folder] = {}

    @property
    def states(self) -> Mapping[str, TokenState]:
        """The state of each model with a folder."""
        return {model: _state(folder.pods) for model, folder in self._folders.items()}

    def is_another(self, address: str) -> None:
        """Compare a pod again: it is a new process now."""
        for folder in self._folders.values():
            folder.pods.pop(address, None)

    async def look(
        self,
        tokenizers: Mapping[str, ModelTokenizer],
        models: Sequence[ServedModel],
        pods: Callable[[str], Sequence[str]],
    ) -> None:
        """Compare each model with one pod not compared yet; `pods` returns the pods that serve a model now."""
        for name in self._folders.keys() - tokenizers.keys():
            del self._folders[name]
            self._doubts.pop(name, None)
        for model in models:
            tokenizer = tokenizers.get(model.name)
            if tokenizer is None:
                continue
            folder = self._folders.get(model.name)
            if folder is None or folder.tokenizer is not tokenizer:
                folder = self._folders[model.name] = _Folder(tokenizer)
                self._doubts.pop(model.name, None)
            await self._look_at(model, folder, pods(model.name))
            self._say(model.name, folder)

    async def _look_at(self, model: ServedModel, folder: _Folder, serving: Sequence[str]) -> None:
        now = self._clock()
        # only serving pods are asked; results of an absent pod stay until `keep`, because it may come back unchanged
        due = (each for each in serving if (asked := folder.pods.get(each)) is None or _is_due(asked, now))
        address = next(due, None)
        if address is None:
            return
        asked = folder.pods.setdefault(address, _Asked())
        try:
            asked.difference = await self._difference(model, folder.tokenizer, address)
        except RenderUnavailableError as error:
            asked.problem = str(error)
            asked.retries.failed(now)
        self._judge(model.name, folder)

    def keep(self, addresses: Sequence[str]) -> None:
        """Drop all other pods: they are gone."""
        kept = frozenset(addresses)
        for model, folder in self._folders.items():
            folder.pods = {address: asked for address, asked in folder.pods.items() if address in kept}
            self._judge(model, folder)

    async def _difference(self, model: ServedModel, tokenizer: ModelTokenizer, address: str) -> str:
        """Return how the pod's tokens differ, "" if they are equal. Raise RenderUnavailableError."""
        compared = 0
        for probe in PROBES:
            ours = tokens_of_probe(probe, model.name, tokenizer)
            if isinstance(ours, str):
                continue  # no tokens of our own: at run time the pods are asked
            body = probe.body(model.name)
            prompt = await self._render.ask_one(address, parse_request(path=probe.path, body=body), body, model=model)
            if prompt is None:
                continue  # the pod would not serve such a prompt
            compared += 1
            theirs = token_ids(prompt.tokens)
            if ours != theirs:
                return f"{probe.name}: {difference(ours, theirs)}"
        if not compared:
            raise RenderUnavailableError("it refuses all probes, or the folder makes no tokens of them")
        return ""

    def _judge(self, model: str, folder: _Folder) -> None:
        compared = [asked.difference for asked in folder.pods.values() if asked.difference is not None]
        if 2 * sum(map(bool, compared)) > len(compared):
            self._doubts[model] = _state(folder.pods).why
        else:
            self._doubts.pop(model, None)

    def _say(self, model: str, folder: _Folder) -> None:
        """Log a changed verdict, except DIFFERS: that is a finding, logged by its reporter."""
        state, now = _state(folder.pods), self._clock()
        if not folder.pods or state.verdict is folder.said or now - folder.said_at < SAID_EVERY_SECONDS:
            return
        folder.said, folder.said_at = state.verdict, now
        if state.verdict is not TokenVerdict.DIFFERS:
            log.info("the tokens of the model %s are %s: %s", model, state.verdict, state.why)


def tokens_of_probe(probe: Probe, model: str, tokenizer: ModelTokenizer) -> Tokens:
    """Return the folder's tokens of a probe, or why it has none."""
    try:
        (buffer,) = tokenizer.token_buffers(parse_request(path=probe.path, body=probe.body(model)))
    except (PromptTokensError, PickError) as error:
        return str(error)
    return token_ids(buffer)


def _is_due(asked: _Asked, now: float) -> bool:
    return asked.difference is None and asked.retries.is_due(now)


def _state(pods: Mapping[str, _Asked]) -> TokenState:
    compared = {address: asked.difference for address, asked in pods.items() if asked.difference is not None}
    differ = {address: difference for address, difference in compared.items() if difference}
    if differ:
        shown = "; ".join(f"{address}: {difference}" for address, difference in sorted(differ.items())[:SHOWN_PODS])
        return TokenState(
            TokenVerdict.DIFFERS,
            f"the folder makes other tokens than {len(differ)} of {len(compared)} pods ({shown})",
        )
    if compared:
        return TokenState(TokenVerdict.EXACT, f"the same tokens of all probes as {len(compared)} pods")
    why = "; ".join(f"{address}: {asked.problem}" for address, asked in sorted(pods.items())[:SHOWN_PODS])
    return TokenState(TokenVerdict.UNVERIFIED, why or "no pod that serves the model has reported yet")

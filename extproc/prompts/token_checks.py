"""Whether a model's folder makes its pods' tokens: each pod is asked once about a set of probes, and compared.

A folder that differs from most of the pods is not believed (`prompts.token_trust`): the pods are asked in its place.
One pod that is another model's, or lies, takes no folder away, but then no tokens call themselves exact.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from extproc.errors import PickError, PromptTokensError
from extproc.models.models import ServedModel
from extproc.prompts.pod_render import PodRender, RenderUnavailableError
from extproc.prompts.retries import Retries
from extproc.prompts.token_probes import PROBES, Probe, TokenComparison, Tokens, token_ids
from extproc.prompts.token_trust import Cause, Teller, TokenTrust
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request

log = logging.getLogger(__name__)

SAID_EVERY_SECONDS = 60.0  # of a model, while its verdict changes
SHOWN_PODS = 3


class TokenVerdict(StrEnum):
    """What is known of a folder's tokens."""

    EXACT = "exact"  # the same as those of all pods that could be asked
    UNVERIFIED = "unverified"  # no pod could be asked yet
    DIFFERS = "differs"  # from those of one pod at least


class TokenState(NamedTuple):
    """A verdict, and what it rests on."""

    verdict: TokenVerdict
    why: str


@dataclass(slots=True)
class _Asked:
    """One pod."""

    difference: str | None = None  # "" where there is none; None: it could not be asked
    problem: str = ""
    retries: Retries = field(default_factory=Retries)


@dataclass(slots=True)
class _Folder:
    """One model's tokenizer, and the pods that it was compared with."""

    tokenizer: ModelTokenizer
    pods: dict[str, _Asked] = field(default_factory=dict)
    said: TokenVerdict | None = None
    said_at: float = float("-inf")


class TokenChecks:
    """Those of one pool."""

    def __init__(self, *, render: PodRender, trust: TokenTrust, clock: Callable[[], float] = time.monotonic) -> None:
        self._render = render
        self._trust = trust
        self._clock = clock
        self._folders: dict[str, _Folder] = {}

    @property
    def states(self) -> Mapping[str, TokenState]:
        """Return what is known, by model with a folder."""
        return {model: _state(folder.pods) for model, folder in self._folders.items()}

    def is_another(self, address: str) -> None:
        """Ask a pod again: it is another process now."""
        for folder in self._folders.values():
            folder.pods.pop(address, None)

    async def look(
        self,
        tokenizers: Mapping[str, ModelTokenizer],
        models: Sequence[ServedModel],
        pods: Callable[[str], Sequence[str]],
    ) -> None:
        """Compare with one pod of each model that was not compared yet; `pods` are those that serve a model now."""
        for name in self._folders.keys() - tokenizers.keys():
            del self._folders[name]
            self._trust.believe(name, Teller.FOLDER, Cause.PROBES)
        for model in models:
            tokenizer = tokenizers.get(model.name)
            if tokenizer is None:
                continue
            folder = self._folders.get(model.name)
            if folder is None or folder.tokenizer is not tokenizer:
                folder = self._folders[model.name] = _Folder(tokenizer)
                for cause in Cause:
                    self._trust.believe(model.name, Teller.FOLDER, cause)
            await self._look_at(model, folder, pods(model.name))
            self._say(model.name, folder)

    async def _look_at(self, model: ServedModel, folder: _Folder, serving: Sequence[str]) -> None:
        now = self._clock()
        # of pods that are gone nothing counts; one that is only away may come back the same
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
        """Forget all other pods: they are gone."""
        kept = frozenset(addresses)
        for model, folder in self._folders.items():
            folder.pods = {address: asked for address, asked in folder.pods.items() if address in kept}
            self._judge(model, folder)

    async def _difference(self, model: ServedModel, tokenizer: ModelTokenizer, address: str) -> str:
        """Return where the pod's tokens are others, "" where they are not. Raise RenderUnavailableError."""
        compared = 0
        for probe in PROBES:
            ours = tokens_of_probe(probe, model.name, tokenizer)
            if isinstance(ours, str):
                continue  # the pods are asked about such prompts
            body = probe.body(model.name)
            prompt = await self._render.ask_one(address, parse_request(path=probe.path, body=body), body, model=model)
            if prompt is None:
                continue  # it would not serve such a prompt
            compared += 1
            theirs = token_ids(prompt.tokens)
            if ours != theirs:
                one = TokenComparison(
                    model=model.name, probe=probe.name, is_chat=probe.is_chat, ours=ours, theirs=theirs
                )
                return f"{probe.name}: {one.difference}"
        if not compared:
            raise RenderUnavailableError("it refuses all probes, or the folder makes no tokens of them")
        return ""

    def _judge(self, model: str, folder: _Folder) -> None:
        """Believe the folder, or do not: as most of the pods say."""
        compared = [asked.difference for asked in folder.pods.values() if asked.difference is not None]
        differ = [difference for difference in compared if difference]
        if differ and 2 * len(differ) >= len(compared):
            self._trust.distrust(model, Teller.FOLDER, Cause.PROBES, _state(folder.pods).why)
        else:
            self._trust.believe(model, Teller.FOLDER, Cause.PROBES)

    def _say(self, model: str, folder: _Folder) -> None:
        """Log a verdict that has changed; what differs is a finding, which its reporter says."""
        state, now = _state(folder.pods), self._clock()
        if not folder.pods or state.verdict is folder.said or now - folder.said_at < SAID_EVERY_SECONDS:
            return
        folder.said, folder.said_at = state.verdict, now
        if state.verdict is not TokenVerdict.DIFFERS:
            log.info("the tokens of the model %s are %s: %s", model, state.verdict, state.why)


def tokens_of_probe(probe: Probe, model: str, tokenizer: ModelTokenizer) -> Tokens:
    """Return what a model's folder makes of a probe."""
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

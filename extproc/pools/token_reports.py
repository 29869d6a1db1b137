"""Says which models are routed on text only: a finding, a metric, and a log line when one appears or is gone."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from extproc.prompts.token_watch import TokenWatch

log = logging.getLogger(__name__)

TEXT_ONLY = "text-only"
REMEDY = (
    "give the model a tokenizer folder (--tokenizer, KVMESH_TOKENIZERS, `tokenizer` in `models`), or let the picker "
    "ask its pods: `tokens: auto`, and vLLM pods that answer POST /tokenize or, with --enable-scale-out, /render"
)
SAID_EVERY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFinding:
    """A model whose prompts are not tokenized."""

    model: str
    reason: str
    message: str


class TokenReporter:
    """Looks at where tokens came from, and says what has changed."""

    def __init__(self, *, watch: TokenWatch, show: Callable[..., None], clock: Callable[[], float]) -> None:
        """`show(model=, reason=, stands=)` shows a finding that has appeared or healed."""
        self._watch = watch
        self._show = show
        self._clock = clock
        self._standing: dict[str, TokenFinding] = {}
        self._said: set[str] = set()  # of those that stand
        self._said_at: dict[str, float] = {}

    @property
    def findings(self) -> Mapping[str, TokenFinding]:
        """Return the findings by model, as of the last look."""
        return self._standing

    def look(self) -> None:
        """Judge what has come, and say which findings have come and gone; of a model one line a minute at most."""
        now, before = self._clock(), self._standing
        self._watch.judge(now=now)
        self._standing = {model: _finding(model, why) for model, why in self._watch.text_only.items()}
        for model in self._standing.keys() - before.keys():
            self._show(model=model, reason=TEXT_ONLY, stands=True)
        for model in before.keys() - self._standing.keys():
            self._show(model=model, reason=TEXT_ONLY, stands=False)
            if model in self._said:
                self._said.discard(model)
                log.info("%s: prompts of the model %s are tokenized again", TEXT_ONLY, model)
        for model in self._standing.keys() - self._said:
            if now - self._said_at.get(model, now - SAID_EVERY_SECONDS) >= SAID_EVERY_SECONDS:
                self._said.add(model)
                self._said_at[model] = now
                log.warning("%s: %s", TEXT_ONLY, self._standing[model].message)


def _finding(model: str, why: str) -> TokenFinding:
    because = f" ({why})" if why else ""
    return TokenFinding(
        model=model,
        reason=TEXT_ONLY,
        message=f"{model}: prompts are routed on their text, which only predicts{because}: {REMEDY}",
    )

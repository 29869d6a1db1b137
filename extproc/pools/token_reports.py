"""Says what is wrong with models' tokens: a finding, a metric, and a log line when one appears or is gone.

They are routed on text only; a source of tokens says others than the pods have; a folder cannot be loaded.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from extproc.models.models import ServedModel
from extproc.policy.model_tokens import ModelTokens, not_seen
from extproc.prompts.prompt_tokens import TOKENS_DIFFER
from extproc.prompts.token_watch import TokenSource, TokenWatch

log = logging.getLogger(__name__)

TEXT_ONLY = "text-only"
TOKENIZER_FOLDER = "tokenizer-folder"
MODELS_UNKNOWN = "models-unknown"
REMEDIES: Mapping[str, str] = {
    TOKENS_DIFFER: "compare the tokenizer folder, the chat template and its default kwargs with the pods' "
    "(`kvmesh doctor`)",
    TOKENIZER_FOLDER: "copy the folder that the pods load again; it is tried again by itself",
    TEXT_ONLY: "give the model a tokenizer folder (--tokenizer, KVMESH_TOKENIZERS, `tokenizer` in `models`), or let "
    "the picker ask its pods: `tokens: auto`, and vLLM pods that answer POST /tokenize or, with --enable-scale-out, "
    "/render",
    MODELS_UNKNOWN: "see what the pods answer to GET /v1/models (`kvmesh doctor`), or declare the model: the pool's "
    "annotation kvmesh.io/model, or `models` in a policy",
}
FACTS: Mapping[str, str] = {
    TOKENS_DIFFER: "not all that tells its tokens is right, and what is wrong is not used while another can be asked",
    TOKENIZER_FOLDER: "its tokenizer folder cannot be loaded, and the pods are asked",
    TEXT_ONLY: "prompts are routed on their text, which only predicts",
    MODELS_UNKNOWN: "no pod has told which models it serves, and none is declared: prompts are routed on their text, "
    "and the index is not asked",
}
WORST_FIRST = (TEXT_ONLY, TOKENS_DIFFER, TOKENIZER_FOLDER)  # of a model with several
SAID_EVERY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFinding:
    """A model with whose tokens something is wrong."""

    model: str
    reason: str
    message: str


class TokenReporter:
    """Looks at where tokens came from, and says what has changed."""

    def __init__(
        self,
        *,
        watch: TokenWatch,
        show: Callable[..., None],
        clock: Callable[[], float],
        found: Mapping[str, Callable[[], Mapping[str, str]]] | None = None,
    ) -> None:
        """`found` says, for each further reason, which models have it and why.

        `show(model=, reason=, stands=)` shows a finding that has appeared or healed.
        """
        self._watch = watch
        self._found = {TEXT_ONLY: lambda: watch.text_only, **(found or {})}
        self._show = show
        self._clock = clock
        self._standing: dict[tuple[str, str], TokenFinding] = {}
        self._said: set[tuple[str, str]] = set()  # of those that stand
        self._said_at: dict[tuple[str, str], float] = {}

    @property
    def findings(self) -> Mapping[tuple[str, str], TokenFinding]:
        """Return the findings by model and reason, as of the last look."""
        return self._standing

    def look(self) -> None:
        """Judge what has come, and say which findings have come and gone; of each one line a minute at most."""
        now, before = self._clock(), self._standing
        self._watch.judge(now=now)
        self._standing = {
            (model, reason): _finding(model, reason, why)
            for reason, found in self._found.items()
            for model, why in found().items()
        }
        for model, reason in self._standing.keys() - before.keys():
            self._show(model=model, reason=reason, stands=True)
        for name in before.keys() - self._standing.keys():
            model, reason = name
            self._show(model=model, reason=reason, stands=False)
            if name in self._said:
                self._said.discard(name)
                log.info("%s: this is over for the model %s", reason, model)
        for name in self._standing.keys() - self._said:
            if now - self._said_at.get(name, now - SAID_EVERY_SECONDS) >= SAID_EVERY_SECONDS:
                self._said.add(name)
                self._said_at[name] = now
                log.warning("%s: %s", name[1], self._standing[name].message)


def shown_tokens(
    models: Iterable[ServedModel], *, sources: Mapping[str, TokenSource], reporter: TokenReporter
) -> tuple[ModelTokens, ...]:
    """Return where each model's tokens come from: what its requests have shown, else only what is wanted."""
    shown = []
    for expected in not_seen(models):
        seen = sources.get(expected.model)
        names = ((expected.model, reason) for reason in WORST_FIRST)
        finding = next((reporter.findings[name] for name in names if name in reporter.findings), None)
        if finding is not None:
            reason, message = finding.reason, finding.message
        elif seen is not None:
            reason, message = "", ""
        else:
            reason, message = expected.reason, expected.message
        shown.append(replace(expected, seen="" if seen is None else seen.value, reason=reason, message=message))
    return tuple(shown)


def _finding(model: str, reason: str, why: str) -> TokenFinding:
    because = f" ({why})" if why else ""
    return TokenFinding(model=model, reason=reason, message=f"{model}: {FACTS[reason]}{because}: {REMEDIES[reason]}")

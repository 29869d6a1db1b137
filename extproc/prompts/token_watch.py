"""Where the tokens of each model's prompts come from: its folder, its pods, or nowhere. Pure; time is an argument.

A prompt costs one addition. Models are configured names, hence few.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

UNKNOWN_MODEL = "(unknown)"  # in place of a model that is neither configured nor learned
LEAST_PROMPTS = 5  # say what a model's source is: one odd request does not
WINDOW_SECONDS = 60.0


class TokenSource(StrEnum):
    """What made the tokens of a request's prompts."""

    FOLDER = "folder"  # of its tokenizer, in this process
    PODS = "pods"  # one was asked, or what it said before was still known
    CLIENT = "client"  # it sent token ids
    TEXT = "text"  # nothing: chunks of the text, which only predict


# the more exact first, which also counts where two are as frequent; a client's ids say nothing of the model
_OF_MODELS = (TokenSource.FOLDER, TokenSource.PODS, TokenSource.TEXT)


@dataclass(slots=True)
class _Model:
    counts: dict[TokenSource, int] = field(default_factory=lambda: dict.fromkeys(TokenSource, 0))  # since the start
    before: dict[TokenSource, int] = field(default_factory=lambda: dict.fromkeys(TokenSource, 0))  # the window's start
    since: float | None = None  # of the window, monotonic seconds
    source: TokenSource | None = None
    is_certain: bool = False
    why: str = ""  # of the last prompt without tokens

    def judge(self, now: float) -> None:
        found = {source: self.counts[source] - self.before[source] for source in _OF_MODELS}
        total = sum(found.values())
        self.since = now if self.since is None else self.since
        if total and (total >= LEAST_PROMPTS or not self.is_certain):
            self.source = max(_OF_MODELS, key=found.__getitem__)
            self.is_certain = total >= LEAST_PROMPTS
        if total >= LEAST_PROMPTS and now - self.since >= WINDOW_SECONDS:
            self.before, self.since = self.counts.copy(), now


class TokenWatch:
    """Counts prompts by model and source, and says from where most of a model's last ones got their tokens."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def took(self, model: str, source: TokenSource, *, why: str = "") -> None:
        """Count one request; `model` is "" where it is not a configured one, `why` says why there are no tokens."""
        seen = self._models.get(model)
        if seen is None:
            seen = self._models[model] = _Model()
        seen.counts[source] += 1
        if why:
            seen.why = why

    def judge(self, *, now: float) -> None:
        """Look at what has come since the window began; to be called every few seconds."""
        for seen in self._models.values():
            seen.judge(now)

    def keep(self, models: Collection[str]) -> None:
        """Let go of all other models: they are not configured any more."""
        self._models = {name: seen for name, seen in self._models.items() if name in models or not name}

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return the requests by model and source since the start."""
        return {
            (name or UNKNOWN_MODEL, source.value): count
            for name, seen in self._models.items()
            for source, count in seen.counts.items()
            if count
        }

    @property
    def sources(self) -> Mapping[str, TokenSource]:
        """Return the source of most of each model's last prompts; without those that had none yet."""
        return {name: seen.source for name, seen in self._models.items() if name and seen.source is not None}

    @property
    def has_unknown(self) -> bool:
        """Whether the last prompts of models that are not configured had no tokens."""
        seen = self._models.get("")
        return seen is not None and seen.is_certain and seen.source is TokenSource.TEXT

    @property
    def text_only(self) -> Mapping[str, str]:
        """Return why, by model, of those whose last prompts had no tokens."""
        return {
            name: seen.why
            for name, seen in self._models.items()
            if name and seen.is_certain and seen.source is TokenSource.TEXT
        }

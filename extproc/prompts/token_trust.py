"""Which sources of a model's tokens are believed: its folder, its pods' /render, their /tokenize. Pure.

A source is let go of when its tokens are found wrong, and the next one is asked. It is believed again when it may say
something else: when the pods or the folder's files have changed. Models are configured names, hence few.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from enum import StrEnum

LAST_ANSWERS = 50  # of a model's pods: who told most of these is to blame where they are wrong


class Teller(StrEnum):
    """Who says what a prompt's tokens are; the first that is believed and can say it counts."""

    FOLDER = "folder"
    RENDER = "/render"
    TOKENIZE = "/tokenize"


OF_PODS = (Teller.RENDER, Teller.TOKENIZE)


class Cause(StrEnum):
    """How wrong tokens were found."""

    PROBES = "probes"  # the folder's were compared with a pod's
    DRIFT = "drift"  # pods counted other prompts than they were expected to


class TokenTrust:
    """Nobody is distrusted until something is found."""

    def __init__(self) -> None:
        self._doubts: dict[tuple[str, Teller], dict[Cause, str]] = {}
        self._told: dict[str, deque[Teller]] = {}

    def doubt(self, model: str, teller: Teller) -> str | None:
        """Return why it is not believed, None where it is."""
        causes = self._doubts.get((model, teller))
        return None if causes is None else "; ".join(causes.values())

    def told(self, model: str, teller: Teller) -> None:
        """Take note that a pod's answer was used."""
        seen = self._told.get(model)
        if seen is None:
            seen = self._told[model] = deque(maxlen=LAST_ANSWERS)
        seen.append(teller)

    def teller_of_most(self, model: str) -> Teller | None:
        """Return which of its pods' paths told most of the last answers, None where none has."""
        seen = self._told.get(model)
        return Counter(seen).most_common(1)[0][0] if seen else None

    def distrust(self, model: str, teller: Teller, cause: Cause, why: str) -> bool:
        """Let go of a source; return whether it was believed before."""
        is_new = (model, teller) not in self._doubts
        self._doubts.setdefault((model, teller), {})[cause] = why
        if is_new:
            self._told.pop(model, None)  # what comes from now on is another source's
        return is_new

    def believe(self, model: str, teller: Teller, cause: Cause) -> None:
        """Take back what was found in one way; other causes may stand."""
        causes = self._doubts.get((model, teller))
        if causes is not None and causes.pop(cause, None) is not None and not causes:
            del self._doubts[model, teller]

    def renew(self) -> frozenset[str]:
        """Begin anew with what responses have shown: the pods have changed. Return the models that had such doubts."""
        found = frozenset(model for (model, _), causes in self._doubts.items() if Cause.DRIFT in causes)
        for model, teller in tuple(self._doubts):
            self.believe(model, teller, Cause.DRIFT)
        self._told.clear()
        return found

    def keep(self, models: Collection[str]) -> None:
        """Forget all other models: they are not configured any more."""
        self._doubts = {name: causes for name, causes in self._doubts.items() if name[0] in models}
        self._told = {model: seen for model, seen in self._told.items() if model in models}

    @property
    def doubts(self) -> Mapping[str, str]:
        """Return, by model, what is found wrong with whom."""
        found: dict[str, list[str]] = {}
        for (model, teller), causes in self._doubts.items():
            found.setdefault(model, []).append(f"{teller}: {'; '.join(causes.values())}")
        return {model: ". ".join(texts) for model, texts in found.items()}

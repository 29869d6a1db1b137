"""Token sources of a pool's models, for policies' statuses and `kvmesh policy explain`. Pure values.

A running picker has seen the sources; documents alone show only the configured ones.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from extproc.models.models import ServedModel, TokensFrom

NOT_SEEN = "not-seen"
UNVERIFIED = {
    TokensFrom.AUTO: "its pods are to be asked; until a request has come, nobody knows whether they tell tokens: "
    "`kvmesh doctor` asks them (render)",
    TokensFrom.RENDER: "a pod's /render is to be asked; until a request has come, nobody knows whether it answers: "
    "`kvmesh doctor` asks it (render)",
    TokensFrom.TOKENIZER: "its folder is to be used, and no request has come yet",
    TokensFrom.TEXT: "it is to be routed on its text (`tokens: text`), which only predicts: give it a tokenizer "
    "folder, or `tokens: auto`",
}
MOST_NAMED = 3  # models, in one condition


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokens:
    """The token source of one model of a pool."""

    model: str
    wanted: str  # `tokens` in `models.served`
    seen: str = ""  # source for its last prompts: "folder", "pods", "text"; "" before the first
    reason: str = ""  # the finding, like "text-only"; NOT_SEEN before the first prompt; "" if its tokens are exact
    message: str = ""  # the meaning of the reason, and the fix


def not_seen(models: Iterable[ServedModel]) -> tuple[ModelTokens, ...]:
    """Return the token sources of models as far as documents show them."""
    return tuple(
        ModelTokens(
            model=each.name, wanted=each.tokens_from.value, reason=NOT_SEEN, message=UNVERIFIED[each.tokens_from]
        )
        for each in models
    )


def found_wrong(
    tokens: Mapping[str, Sequence[ModelTokens]], pools: Iterable[str]
) -> tuple[tuple[str, ModelTokens], ...]:
    """Return the models of these pools whose tokens requests have shown not to be exact, each with its pool."""
    return tuple((pool, each) for pool in pools for each in tokens.get(pool, ()) if each.reason not in ("", NOT_SEEN))


def as_told(found: Iterable[tuple[str, ModelTokens]]) -> frozenset[tuple[str, str, str]]:
    """Return the parts whose change updates a status (pools, models, reasons); messages change with each request."""
    return frozenset((pool, each.model, each.reason) for pool, each in found)


def condition_words(found: Sequence[tuple[str, ModelTokens]]) -> tuple[str, str]:
    """Return the reason and the message of a condition; `found` has at least one model."""
    by_message: defaultdict[str, list[str]] = defaultdict(list)
    for pool, each in found[:MOST_NAMED]:
        by_message[each.message].append(pool)
    said = [f"{message} (at {', '.join(pools)})" for message, pools in by_message.items()]
    more = len(found) - MOST_NAMED
    reason = "".join(word.capitalize() for word in found[0][1].reason.split("-"))
    return reason, "; ".join(said) + (f"; and {more} more" if more > 0 else "")

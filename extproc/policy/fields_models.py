"""The fields of `spec.models`; part of `policy_fields`. Folders are inside the picker's container."""

from collections.abc import Mapping
from typing import Any

from extproc.models.models import StickyBy, TokensFrom
from extproc.policy.field_kinds import Choice, Flag, ListOf, Number, Property, Record, Rule, Text

MODEL = Text(most=256)
# whoever may write a policy may not have the picker read files from anywhere by way of ".."
FILE = Text(most=1024, pattern=r"^/([^.]|\.[^.])*\.?$", words="an absolute path without '..'")
HEADER = Text(most=128, pattern=r"^:?[-!#$%&'*+.^_`|~0-9a-z]+$", words="a header's name in lower case")


def _names(most: int, words: str) -> Property:
    return Property(kind=ListOf(item=MODEL, most=most, unique=True), words=words)


def _has_folder(model: Mapping[str, Any]) -> bool:
    return model.get("tokens") != TokensFrom.TOKENIZER or "tokenizer" in model


SERVED = Record(
    properties={
        "name": Property(kind=MODEL, required=True, words="the first of vLLM's --served-model-name"),
        "aliases": _names(64, "its further served names"),
        "adapters": _names(1024, "LoRA adapters; those that pods report need not be listed"),
        "tokens": Property(
            kind=Choice(of=tuple(TokensFrom)),
            usual="tokenizer with a folder, else text",
            words="where token ids come from: the folder, a pod's render endpoint, or nowhere",
        ),
        "tokenizer": Property(kind=FILE, words="folder in the picker's container"),
        "chatTemplate": Property(kind=FILE, words="file in the picker's container, in place of the folder's"),
        "chatTemplateKwargs": Property(
            kind=ListOf(
                item=Record(
                    properties={
                        "name": Property(kind=Text(most=128), required=True, words="of the argument"),
                        "value": Property(
                            kind=Text(least=0, most=1024), required=True, words="JSON where it is, else a text"
                        ),
                    }
                ),
                most=16,
                keys=("name",),
                as_mapping=True,
                value="value",
            ),
            words="vLLM's --default-chat-template-kwargs",
        ),
        "maxModelLen": Property(
            kind=Number(least=1, most=1_000_000_000, whole=True),
            words="tokens of prompt and output",
            usual="as pods tell",
        ),
    },
    rules=(
        Rule(
            cel="!has(self.tokens) || self.tokens != 'tokenizer' || has(self.tokenizer)",
            message="tokens from a tokenizer need its folder",
            holds=_has_folder,
            at="tokens",
        ),
    ),
)

TARGET = Record(
    properties={
        "model": Property(kind=MODEL, required=True, words="the name that the pod gets"),
        "weight": Property(kind=Number(most=1e9), default=1, usual="1", words="its share; 0 stops the arm"),
    }
)

RULE = Record(
    properties={
        "model": Property(kind=MODEL, required=True, words='as clients write it; "*": every name without a rule'),
        "targets": Property(
            kind=ListOf(
                item=TARGET,
                least=1,
                most=16,
                keys=("model",),
                rules=(
                    Rule(
                        cel="self.exists(t, !has(t.weight) || t.weight > 0.0)",
                        message="at least one weight must be above 0",
                        holds=lambda targets: any(target.get("weight") != 0 for target in targets),
                    ),
                ),
            ),
            required=True,
            words="one: a rewrite; several: a split by weight",
        ),
        "stickyBy": Property(
            kind=Choice(of=tuple(StickyBy)),
            default=StickyBy.NOTHING.value,
            usual="nothing",
            words="what keeps a client",
        ),
        "stickyHeader": Property(kind=HEADER, words="with stickyBy: header"),
        "fallbacks": _names(16, "models tried in order when no endpoint of the target is ready"),
    },
    rules=(
        Rule(
            cel="(has(self.stickyBy) && self.stickyBy == 'header') == has(self.stickyHeader)",
            message="stickyHeader is needed with stickyBy: header, and only there",
            holds=lambda rule: (rule.get("stickyBy") == StickyBy.HEADER) == ("stickyHeader" in rule),
            at="stickyBy",
        ),
    ),
)

MODELS = Record(
    properties={
        "served": Property(kind=ListOf(item=SERVED, most=64, keys=("name",)), words="the pods' base models"),
        "rules": Property(
            kind=ListOf(item=RULE, most=256, keys=("model",)), words="what becomes of requests for a name"
        ),
        "onlyListed": Property(kind=Flag(), usual="false", words="any other name is answered 404"),
    }
)

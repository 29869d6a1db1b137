"""What only a model's config.json says of its prompts: how pairs are scored, and whether it fills in the middle. Pure.

As vLLM 0.32 decides it (vllm/entrypoints/pooling/scoring/io_processor.py, vllm/renderers/deepseek_v4.py). What its
flags change cannot be seen in the folder: for pods with --hf-overrides, write the same into the folder's config.json.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from extproc.errors import TokenizerError
from extproc.prompts.token_ids import TOKEN_BYTES
from extproc.requests.request import ChatPrompt, PairPrompt, Prompt, TextPrompt, TokenPrompt

FIM_ARCHITECTURES = frozenset(("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"))
FIM = "<｜fim▁begin｜>{prompt}<｜fim▁hole｜>{suffix}<｜fim▁end｜>"
# their own code puts the query and all documents into one prompt
RANKING_ARCHITECTURES = frozenset(("JinaForRanking", "JinaVLForRanking"))
CLASSIFIER = "ForSequenceClassification"


class Scoring(Enum):
    """What becomes of a query and a document."""

    TEXTS = "texts"  # two prompts, whose vectors are compared: embedding models
    JOINED = "joined"  # one prompt: the query and the document right behind it
    PAIRS = "pairs"  # one prompt: the tokenizer's own form of a pair
    OWN = "own"  # a form of the model's own code


class PairFrame(NamedTuple):
    """The special tokens of a tokenizer's pair (little-endian uint32)."""

    before: bytes
    between: bytes
    after: bytes


class PromptForms:
    """The forms of one model's prompts."""

    def __init__(self, *, scoring: Scoring, has_template: bool, fills_in_middle: bool, pair: PairFrame | None) -> None:
        """`has_template`: pods have a --chat-template. `pair`: None where the tokenizer's form is not understood."""
        self._scoring = scoring
        self._has_template = has_template and scoring in (Scoring.JOINED, Scoring.PAIRS)
        self._fills_in_middle = fills_in_middle
        self._pair = pair

    @classmethod
    def of(cls, config: Mapping[str, Any], *, tokenizer: Any, has_template: bool) -> "PromptForms":
        """Read a model's config.json; `tokenizer` is the `tokenizers.Tokenizer` of its folder."""
        architectures = frozenset(name for name in config.get("architectures") or () if isinstance(name, str))
        return cls(
            scoring=scoring_of(config, architectures),
            has_template=has_template,
            fills_in_middle=not architectures.isdisjoint(FIM_ARCHITECTURES),
            pair=pair_frame(tokenizer),
        )

    def single(self, prompts: Sequence[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts that the pod makes of these: of pairs, each query once and then its documents.

        Raise TokenizerError for what vLLM refuses, or makes in the model's own code.
        """
        queried: set[str] = set()
        for prompt in prompts:
            if isinstance(prompt, TextPrompt) and prompt.suffix is not None:
                yield self._in_the_middle(prompt)
            elif not isinstance(prompt, PairPrompt):
                yield prompt
            elif self._scoring is Scoring.OWN:
                raise TokenizerError("the model's own code puts queries and documents into prompts")
            elif self._scoring is Scoring.TEXTS:
                if prompt.query not in queried:
                    queried.add(prompt.query)
                    yield TextPrompt(text=prompt.query)
                yield TextPrompt(text=prompt.document)
            elif self._has_template:
                yield _templated(prompt)
            elif self._scoring is Scoring.JOINED or not prompt.document:  # a pair with nothing is none
                yield TextPrompt(text=prompt.query + prompt.document)
            else:
                yield prompt

    def encode_pair(self, pair: PairPrompt, encode: Callable[[str], bytes]) -> bytes:
        """Return a pair's tokens; `encode` makes them of a text, without special tokens. Raise TokenizerError."""
        if self._pair is None:
            raise TokenizerError("the tokenizer's form of a pair is not understood here")
        before, between, after = self._pair
        return b"".join((before, encode(pair.query), between, encode(pair.document), after))

    def _in_the_middle(self, prompt: TextPrompt) -> TextPrompt:
        if not self._fills_in_middle:
            raise TokenizerError("pods refuse `suffix`: the model does not fill in the middle")
        text = FIM.format(prompt=prompt.text, suffix=prompt.suffix)
        return TextPrompt(text=text, add_special_tokens=prompt.add_special_tokens)


def scoring_of(config: Mapping[str, Any], architectures: frozenset[str]) -> Scoring:
    """Return what pods make of a query and a document."""
    if not architectures.isdisjoint(RANKING_ARCHITECTURES):
        return Scoring.OWN
    if not any(name.endswith(CLASSIFIER) for name in architectures):
        return Scoring.TEXTS
    separates = config.get("use_pad_token")  # the older name, which wins
    if separates is None:
        was_language_model = config.get("classifier_from_token") is not None or config.get("method") is not None
        # vLLM notes it in the inner configuration of a model for texts and images, and looks for it in the outer one
        joins = was_language_model and "text_config" not in config
        separates = config.get("use_sep_token", not joins)
    return Scoring.PAIRS if separates else Scoring.JOINED


def pair_frame(tokenizer: Any) -> PairFrame | None:
    """Return the special tokens around and between two texts, None where they depend on the texts."""
    first, second = (_packed(tokenizer.encode(text, add_special_tokens=False).ids) for text in ("a", "b"))
    pair = _packed(tokenizer.encode("a", "b", add_special_tokens=True).ids)
    if not first or not second:
        return None
    for begin in range(0, len(pair), TOKEN_BYTES):
        middle = begin + len(first)
        if pair[begin:middle] != first:
            continue
        for at in range(middle, len(pair), TOKEN_BYTES):
            if pair[at : at + len(second)] == second:
                return PairFrame(pair[:begin], pair[middle:at], pair[at + len(second) :])
    return None


def _templated(pair: PairPrompt) -> ChatPrompt:
    return ChatPrompt(
        messages=({"role": "query", "content": pair.query}, {"role": "document", "content": pair.document}),
        add_generation_prompt=False,
        add_special_tokens=True,
        chat_template_kwargs=pair.chat_template_kwargs,
    )


def _packed(ids: Sequence[int]) -> bytes:
    return TokenPrompt.of(ids).token_bytes

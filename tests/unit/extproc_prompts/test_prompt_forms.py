"""What pods make of a query and a document, and of a prompt with a suffix, by the model's config.json."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from extproc.errors import TokenizerError
from extproc.prompts.tokenizer import ModelTokenizer, PairFrame, Scoring, pair_frame, scoring_of
from extproc.requests.openai import parse_request

WORDS = ["[CLS]", "[SEP]", "a", "b", "c", "q", "d"]
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}


def words() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[CLS]"))
    made.pre_tokenizer = Whitespace()
    return made


def bert() -> tokenizers.Tokenizer:
    made = words()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return made


def folder(path: Path, config: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(config))
    return path


def buffers(tokenizer: ModelTokenizer, path: str, **body: Any) -> list[list[int]]:
    request = parse_request(path=path, body=json.dumps(body).encode())
    return [list(array("I", buffer)) for buffer in tokenizer.token_buffers(request)]


@pytest.mark.parametrize(
    ("config", "scoring"),
    [
        ({}, Scoring.TEXTS),
        ({"architectures": ["Qwen3ForCausalLM"]}, Scoring.TEXTS),
        ({"architectures": ["ModernBertModel"]}, Scoring.TEXTS),
        ({"architectures": ["JinaForRanking"]}, Scoring.OWN),
        (CLASSIFIER, Scoring.PAIRS),
        ({**CLASSIFIER, "use_sep_token": False}, Scoring.JOINED),
        ({**CLASSIFIER, "use_sep_token": False, "use_pad_token": True}, Scoring.PAIRS),
        ({**CLASSIFIER, "classifier_from_token": ["no", "yes"]}, Scoring.JOINED),
        ({**CLASSIFIER, "classifier_from_token": ["no", "yes"], "use_sep_token": True}, Scoring.PAIRS),
        ({**CLASSIFIER, "method": "from_2_way_softmax"}, Scoring.JOINED),
        ({**CLASSIFIER, "method": "from_2_way_softmax", "text_config": {}}, Scoring.PAIRS),
    ],
)
def test_the_configuration_says_what_becomes_of_a_pair(config: dict[str, Any], scoring: Scoring) -> None:
    assert scoring_of(config, frozenset(config.get("architectures", ()))) is scoring


def test_a_pair_s_special_tokens_are_found_around_any_texts() -> None:
    assert pair_frame(bert()) == PairFrame(*(array("I", ids).tobytes() for ids in ([0], [1], [1])))
    assert pair_frame(words()) == PairFrame(b"", b"", b"")


@pytest.mark.parametrize(
    ("config", "made", "expected"),
    [
        (CLASSIFIER, bert, [[0, 5, 2, 1, 3, 1], [0, 5, 2, 1, 4, 6, 1]]),
        (CLASSIFIER, words, [[5, 2, 3], [5, 2, 4, 6]]),
        ({**CLASSIFIER, "use_sep_token": False}, bert, [[0, 5, 0, 1], [0, 5, 0, 6, 1]]),  # "ab", "ac": no words
        ({}, bert, [[0, 5, 2, 1], [0, 3, 1], [0, 4, 6, 1]]),  # the query once, on its own
    ],
)
def test_pairs_become_what_the_model_takes(config: dict[str, Any], made: Any, expected: Any, tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(folder(tmp_path, config, made()))
    assert buffers(tokenizer, "/rerank", query="q a", documents=["b", "c d"]) == expected


def test_a_pair_with_an_empty_document_is_the_query_alone(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(folder(tmp_path, CLASSIFIER, bert()))
    assert buffers(tokenizer, "/score", text_1="a", text_2=["", "b"]) == [[0, 2, 1], [0, 2, 1, 3, 1]]


def test_with_a_chat_template_of_the_pods_a_pair_is_what_the_template_writes(tmp_path: Path) -> None:
    template = tmp_path / "score.jinja"
    template.write_text(
        "{{ instruction }} {% for message in messages %}{{ message.role[0] }} {{ message.content }} {% endfor %}"
    )
    loaded = ModelTokenizer.load(folder(tmp_path, CLASSIFIER, bert()), chat_template=template)
    assert buffers(loaded, "/score", text_1="a", text_2="b", instruction="c") == [[0, 4, 5, 2, 6, 3, 1]]
    embeds = ModelTokenizer.load(folder(tmp_path, {}, bert()), chat_template=template)
    assert buffers(embeds, "/score", text_1="a", text_2="b") == [[0, 2, 1], [0, 3, 1]]


def test_what_the_model_s_own_code_makes_of_pairs_is_not_known(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(folder(tmp_path, {"architectures": ["JinaForRanking"]}, words()))
    with pytest.raises(TokenizerError, match="own code"):
        buffers(tokenizer, "/score", text_1="a", text_2="b")


def test_a_pair_that_is_cut_is_not_known(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(folder(tmp_path, CLASSIFIER, words()))
    with pytest.raises(TokenizerError, match="of a pair"):
        buffers(tokenizer, "/score", text_1="a", text_2="b", truncate_prompt_tokens=2)


def test_single_texts_and_joined_ones_are_cut_as_any_prompt(tmp_path: Path) -> None:
    joined = ModelTokenizer.load(folder(tmp_path, {**CLASSIFIER, "use_sep_token": False}, words()))
    assert buffers(joined, "/score", text_1="a b ", text_2="c d", truncate_prompt_tokens=3) == [[2, 3, 4]]


def test_a_suffix_is_for_models_that_fill_in_the_middle(tmp_path: Path) -> None:
    made = words()
    made.add_special_tokens(["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"])
    filling = ModelTokenizer.load(folder(tmp_path, {"architectures": ["DeepseekV4ForCausalLM"]}, made))
    assert buffers(filling, "/v1/completions", prompt="a", suffix="b") == [[7, 2, 8, 3, 9]]
    other = ModelTokenizer.load(folder(tmp_path, {"architectures": ["LlamaForCausalLM"]}, made))
    with pytest.raises(TokenizerError, match="does not fill in the middle"):
        buffers(other, "/v1/completions", prompt="a", suffix="b")

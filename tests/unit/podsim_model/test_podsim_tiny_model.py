import random
from pathlib import Path

import fastokens  # type: ignore[import-untyped]
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from podsim.core.generate import Limits, generate_answer
from podsim.errors import RequestRefusedError, SettingsError
from podsim.model_folder import TINY_MODEL, build_vocabulary, load_model_folder
from podsim.train_tokenizer import SPECIAL_TOKENS, VOCABULARY_SIZE, build_tokenizer

FOLDER = load_model_folder(TINY_MODEL)
TURN = "<|im_start|>assistant\n"


def random_text(rng: random.Random) -> str:
    alphabet = [range(32, 127), range(160, 0x3000), range(0x1F300, 0x1F700), [9, 10, 13, 32]]
    return "".join(chr(rng.choice(rng.choice(alphabet))) for _ in range(rng.randrange(120)))


def test_the_shipped_tokenizer_has_its_special_tokens_first_and_4096_tokens() -> None:
    assert [FOLDER.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert FOLDER.vocabulary_size == VOCABULARY_SIZE == 4096


def test_both_tokenizer_libraries_give_identical_ids() -> None:
    file = str(TINY_MODEL / "tokenizer.json")
    reference, fast = Tokenizer.from_file(file), fastokens.Tokenizer.from_file(file)
    rng = random.Random(7)
    texts = [random_text(rng) for _ in range(400)]
    texts += ["", "<|im_start|>user\nhi<|im_end|>\n", " <|eos|> x<|bos|>", "def f(x):\n\treturn x  # ok\r\n\n"]
    for text in texts:
        for special in (True, False):
            expected = reference.encode(text, add_special_tokens=special).ids
            assert fast.encode(text, add_special_tokens=special).ids == expected
    assert FOLDER.fast is not None


def test_bos_comes_with_special_tokens_and_without_them_from_the_template_alone() -> None:
    assert FOLDER.encode("hi", add_special_tokens=True)[0] == 0
    assert 0 not in FOLDER.encode("hi", add_special_tokens=False)
    text = FOLDER.require_chat_template().render([{"role": "user", "content": "hi"}])
    assert FOLDER.encode(text, add_special_tokens=False).count(0) == 1


def test_a_generated_answer_sent_back_as_a_turn_becomes_the_very_same_tokens() -> None:
    head = FOLDER.encode_by_reference(TURN, add_special_tokens=False)
    for seed in range(30):
        answer = generate_answer(random.Random(seed), FOLDER.vocabulary, Limits(max_tokens=500))
        sent_back = TURN + "".join(answer.pieces) + "<|im_end|>"
        assert FOLDER.encode_by_reference(sent_back, add_special_tokens=False) == head + answer.token_ids


def test_a_generated_answer_says_that_it_is_simulated_and_a_short_one_begins_to() -> None:
    def text(tokens: int) -> str:
        limits = Limits(max_tokens=tokens, ignore_eos=True)
        answer = generate_answer(random.Random(tokens), FOLDER.vocabulary, limits)
        assert len(answer.token_ids) == len(answer.pieces) == tokens
        assert FOLDER.decode(answer.token_ids) == "".join(answer.pieces)
        return "".join(answer.pieces)

    assert text(20).startswith(" [simulated] ")
    assert [text(tokens) for tokens in (1, 2, 6)] == [" [", " [si", " [simulated]"]


def test_a_tokenizer_that_cannot_write_it_alone_leaves_it_out() -> None:
    tokenizer = Tokenizer(WordLevel({"yes": 0, "no": 1, "?": 2}, unk_token="?"))

    vocabulary = build_vocabulary(tokenizer, end_of_turn=None)

    assert (vocabulary.opening, vocabulary.opening_texts) == ([], [])


def test_text_survives_encoding_and_decoding() -> None:
    text = "Zwölf Boxkämpfer 日本語 🦊\n\ttab"
    assert FOLDER.decode(FOLDER.encode(text, add_special_tokens=False)) == text


def test_a_freshly_trained_tokenizer_has_the_same_shape() -> None:
    tokenizer = build_tokenizer(iter(["def f(x): return x + 1\n" * 50, "class A: pass\n" * 50]))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert tokenizer.encode("def f", add_special_tokens=True).ids[0] == 0


def test_a_folder_without_a_tokenizer_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"no tokenizer in {tmp_path}"):
        load_model_folder(tmp_path)


def test_a_folder_without_a_chat_template_still_completes_but_refuses_chats(tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    folder = load_model_folder(copy.parent)
    assert folder.encode("hi", add_special_tokens=True)[0] == 0
    with pytest.raises(RequestRefusedError, match="chat template"):
        folder.require_chat_template()

"""Train the tiny tokenizer that podsim ships; run it as `python -m podsim.train_tokenizer DIR`.

Developers call this when the shipped folder `podsim/tiny_model` has to change. The simulator itself only
reads the result: the ids depend on the standard library of the Python that trained them.
"""

import json
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY_SIZE = 4096
BOS, EOS, TURN_START, TURN_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, TURN_START, TURN_END)  # ids 0 to 3
SHIPPED_FOLDER = Path(__file__).parent / "tiny_model"

# The word split of Llama 3's tokenizer.
WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def standard_library_texts() -> Iterator[str]:
    """The sources of the modules at the top of the standard library, in a fixed order."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def build_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE tokenizer with the post-processor of Llama: BOS in front if specials are asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, 0)]),
        ]
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """What `transformers.AutoTokenizer` reads beside tokenizer.json."""
    return {
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        },
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,  # as in ChatML models: the token that ends a turn ends the generation
        "pad_token": EOS,
        "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_folder(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(standard_library_texts()).save(str(folder / "tokenizer.json"), pretty=False)
    config = json.dumps(tokenizer_config(), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    template = SHIPPED_FOLDER / "chat_template.jinja"
    if template.resolve() != (folder / "chat_template.jinja").resolve():
        shutil.copyfile(template, folder / "chat_template.jinja")


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]))

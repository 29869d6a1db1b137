"""A model's folder that has nothing but a SentencePiece tokenizer.model, as Llama 2's had: trained here in a second."""

import io
import json
from pathlib import Path

import sentencepiece

LINES = (
    "The quick brown fox jumps over the lazy dog.",
    "def f(x): return {'a': [x, 0x1F]}",
    "naïve café, Straße, “quotes” and 1,234.56",
    "日本語のテキスト 中文 한국어 Ελληνικά Кириллица",
    "user assistant system tool <s> </s> [INST] [/INST]",
)


def make_folder(folder: Path) -> Path:
    """Write the folder and return it."""
    folder.mkdir()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=1.0,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return folder

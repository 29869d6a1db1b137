"""A folder as gpt-oss's, made of the published vocabulary o200k: the harmony format has its tokens and its pattern."""

import json
from pathlib import Path

from bench.real_folders import REAL_FOLDERS

FIRST_SPECIAL, END = 199_998, 201_088
NAMED = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERN = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)


def make_folder(folder: Path) -> Path:
    """Write the folder and return it; raise FolderUnavailableError where the vocabulary cannot be had."""
    written = json.loads((REAL_FOLDERS["gpt4o"].ensure() / "tokenizer.json").read_text())
    written["model"]["vocab"] = {text: id_ for text, id_ in written["model"]["vocab"].items() if id_ < FIRST_SPECIAL}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    written["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    written["added_tokens"] = [
        {"id": id_, "content": NAMED.get(id_, f"<|reserved_{id_}|>"), **flags} for id_ in range(FIRST_SPECIAL, END)
    ]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(written))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder

"""Folders with Mistral's own tokenizer files: those that mistral-common brings, and newer formats made of them."""

import importlib.resources
import json
import shutil
from pathlib import Path
from typing import Any

# names in the formats that come with no file: the vocabulary is that of an older one, the special tokens their own
FORMATS = ("v7", "v11", "v13", "v15")
FILES = {
    "tekken_v3": ("tekken_240718.json", "tekken.json"),
    "tekken_v3_images": ("tekken_240911.json", "tekken.json"),
    "sentencepiece_v1": ("tokenizer.model.v1", "tokenizer.model.v1"),
    "sentencepiece_v2": ("mistral_instruct_tokenizer_240216.model.v2", "tokenizer.model.v2"),
    "sentencepiece_v3": ("mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model.v3"),
    "sentencepiece_v7": ("mistral_instruct_tokenizer_241114.model.v7", "tokenizer.model.v7"),
}
MISTRAL_FOLDERS = (*FILES, *(f"tekken_{version}" for version in FORMATS))


def make_folders(parent: Path) -> dict[str, Path]:
    """Write the folders and return them by name."""
    data = Path(str(importlib.resources.files("mistral_common"))) / "data"
    made: dict[str, Path] = {}
    for name, (source, target) in FILES.items():
        made[name] = _folder(parent / name)
        shutil.copy(data / source, made[name] / target)
    for version in FORMATS:
        made[f"tekken_{version}"] = _folder(parent / f"tekken_{version}")
        text = json.dumps(_newer(json.loads((data / "tekken_240718.json").read_text()), version))
        (made[f"tekken_{version}"] / "tekken.json").write_text(text)
    return made


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
    (path / "consolidated.safetensors").write_bytes(b"")  # its name says that mistral-common reads the folder
    return path


def _newer(tekken: dict[str, Any], version: str) -> dict[str, Any]:
    """Return a tekken.json with the special tokens that its format has, as Mistral's newer files list them."""
    from mistral_common.tokens.tokenizers.base import SpecialTokens
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    listed = [dict(token) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    known = {token["token_str"] for token in listed}
    listed += [
        {"rank": 0, "token_str": token.value, "is_control": True} for token in SpecialTokens if token.value not in known
    ]
    count = tekken["config"]["default_num_special_tokens"]
    tekken["config"]["version"] = version
    if version == "v15":
        effort = {"type": "enum", "accepts_none": True, "default": "none", "values": ["none", "high"]}
        tekken["model_settings_builder"] = {"reasoning_effort": effort}
    tekken["special_tokens"] = [token | {"rank": rank} for rank, token in enumerate(listed)][:count]
    return tekken

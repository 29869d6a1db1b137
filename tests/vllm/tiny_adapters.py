"""LoRA adapters with random weights for the tiny model, in PEFT's file format; made without torch, in milliseconds.

Used by `test_lora.py`. The same name gives the same weights, so an adapter's text repeats as the base model's does.
"""

import json
import random
import struct
from array import array
from pathlib import Path

RANK = 8
HIDDEN, LAYERS = 64, 2  # of `tiny_weights.py`
MODULES = ("q_proj", "v_proj")


def write_adapter(folder: Path, *, name: str) -> Path:
    """Write the adapter into a new folder `folder/name` and return it."""
    adapter = folder / name
    adapter.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(MODULES),
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    (adapter / "adapter_model.safetensors").write_bytes(safetensors(weights(name)))
    return adapter


def weights(name: str) -> dict[str, tuple[tuple[int, int], "array[float]"]]:
    """Return shape and numbers of every tensor, by PEFT's names."""
    draw = random.Random(name)
    tensors = {}
    for layer in range(LAYERS):
        for module in MODULES:
            for part, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK))):
                key = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{part}.weight"
                tensors[key] = (shape, array("f", (draw.gauss(0.0, 0.3) for _ in range(shape[0] * shape[1]))))
    return tensors


def safetensors(tensors: dict[str, tuple[tuple[int, int], "array[float]"]]) -> bytes:
    """Encode: the header's length, the header as JSON, the numbers (https://github.com/huggingface/safetensors)."""
    header, content = {}, b""
    for name, (shape, numbers) in tensors.items():
        data = numbers.tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content

"""Write a vision model's folder without weights: configuration, processor, the tiny tokenizer with tokens for images.

Runs in the vLLM environment, with torchvision; arguments: "llava" or "qwen2_vl", the folder of the tiny model, the
folder to be written. LLaVA gives every image as many tokens, and vLLM puts its images before the text of a message.
Qwen2-VL gives a large image more, and its template says where it stands.

The server makes the weights (--load-format dummy): transformers 5 names those of LLaVA's vision tower in a way that
vLLM 0.32 does not load.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

LANGUAGE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
SIDE, PATCH = 112, 14  # pixels
QWEN_TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type in ('image', 'image_url') %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.text is defined %}{{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def llava(tiny: Path, folder: Path) -> None:
    tokenizer = with_tokens(tiny, "<image>")
    LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=PATCH,
            projection_dim=64,
        ),
        text_config=LlamaConfig(**LANGUAGE, **ends(tokenizer), head_dim=32),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        architectures=["LlavaForConditionalGeneration"],
        dtype="float32",
    ).save_pretrained(folder)
    LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    shutil.copy(tiny / "chat_template.jinja", folder)


def qwen2_vl(tiny: Path, folder: Path) -> None:
    names = {name: f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad", "vision_pad")}
    tokenizer = with_tokens(tiny, *names.values())
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    Qwen2VLConfig(
        text_config={**LANGUAGE, **ends(tokenizer), "rope_parameters": rope},
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        architectures=["Qwen2VLForConditionalGeneration"],
        dtype="float32",
    ).save_pretrained(folder)
    sizes = {"min_pixels": 4 * 28 * 28, "max_pixels": 128 * 28 * 28}
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        video_processor=Qwen2VLVideoProcessor(**sizes),
        tokenizer=tokenizer,
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)


def with_tokens(tiny: Path, *tokens: str) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer


def ends(tokenizer: Any) -> dict[str, int]:
    return {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


if __name__ == "__main__":
    {"llava": llava, "qwen2_vl": qwen2_vl}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))

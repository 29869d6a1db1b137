"""Write a LLaVA model's folder without weights: configuration, processor, and the tiny tokenizer with an image token.

Runs in the vLLM environment; arguments: the folder of the tiny model, the folder to be written. The server makes the
weights (--load-format dummy): transformers 5 names those of the vision tower in a way that vLLM 0.32 does not load.
"""

import shutil
import sys
from pathlib import Path

from transformers import (  # type: ignore[import-not-found]
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

IMAGE = "<image>"
SIDE, PATCH = 112, 14  # pixels
IMAGE_TOKENS = (SIDE // PATCH) ** 2


def main(tiny: Path, folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
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
        text_config=LlamaConfig(
            vocab_size=len(tokenizer) + 63,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=IMAGE_TOKENS,
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
        image_token=IMAGE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    shutil.copy(tiny / "chat_template.jinja", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Write a Llama model with random weights into a folder that holds its tokenizer; runs in the vLLM environment.

Called by `environment.ensure_model` as a subprocess. The seed is fixed, so greedy text repeats between machines of
one kind; nothing depends on what the text says.
"""

import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
POSITIONS = 4096


def main(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(20240607)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

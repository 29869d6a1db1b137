"""The models whose chats vLLM 0.32 renders in code instead of a template, and the interface of a renderer here.

For most of them the code exists only inside vLLM, not as a separate library. Their folders are then not enough, so the
picker asks the pods. tests/vllm compares the lists with vLLM's source.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from extproc.requests.request import ChatPrompt

# `tokenizer_mode` by architecture (vllm/config/model.py); each mode is a renderer or tokenizer in code.
# DeepSeek and Inkling have no chat template at all. Some chats, like gpt-oss's, contain today's date.
MODES_BY_ARCHITECTURE = {
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "InklingForCausalLM": "inkling",
    "InklingForConditionalGeneration": "inkling",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "MoonshotKimiaForCausalLM": "kimi_audio",
}
HARMONY_MODEL_TYPE = "gpt_oss"  # vllm/renderers/online_renderer.py checks this, not the architecture


class ChatCode(Protocol):
    """Renders conversations directly to tokens, with the library that vLLM itself uses."""

    def tokens(self, prompt: ChatPrompt) -> bytes:
        """Return the ids (little-endian uint32); raise ChatTemplateError if the library or vLLM refuses the chat."""
        ...


def only_vllm_renders(model: Mapping[str, Any]) -> str | None:
    """Return the architecture if only vLLM's own code renders its chats, else None; `model` is config.json."""
    architectures = model.get("architectures") or ()
    return next((name for name in architectures if name in MODES_BY_ARCHITECTURE), None)

"""The models whose chats vLLM 0.32 renders in code instead of a template, and what renders them here.

vLLM's code for most of them is part of vLLM and of no library that could be installed by itself: their folders are not
enough, and the pods are asked. tests/vllm compares the lists with vLLM's source.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from extproc.requests.request import ChatPrompt

# `tokenizer_mode` by architecture (vllm/config/model.py), where each stands for a renderer or a tokenizer in code.
# DeepSeek's and Inkling's chats have no template at all; some, like gpt-oss's, have today's date in them.
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
HARMONY_MODEL_TYPE = "gpt_oss"  # vllm/renderers/online_renderer.py goes by it, not by the architecture


class ChatCode(Protocol):
    """Renders conversations to tokens at once, as the library that vLLM itself uses does."""

    def tokens(self, prompt: ChatPrompt) -> bytes:
        """Return the ids (little-endian uint32); raise ChatTemplateError for what the library or vLLM refuses."""
        ...


def only_vllm_renders(model: Mapping[str, Any]) -> str | None:
    """Return the architecture for whose chats only vLLM has the code, None for any other; `model` is config.json."""
    architectures = model.get("architectures") or ()
    return next((name for name in architectures if name in MODES_BY_ARCHITECTURE), None)

"""Load tokenizer folders and tokenize with vLLM's own code; runs in the vLLM environment, without a server.

Called by `folder_comparison.py` as a subprocess. Reads JSON from standard input, {"answers": folder for the answers,
"folders": {name: path}, "templates": {name: chat template, for folders that have none}, "texts": [text], "chats":
[[path, body]], of chat completions and /v1/messages}, and writes NAME.json for each folder: {"plain": [ids of each text
without special tokens], "special": [with them], "chats": [ids, or null where vLLM refuses]}. Ids are little-endian
uint32 in hexadecimal.
"""

import copy
import json
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from vllm.entrypoints.anthropic.protocol import (  # type: ignore[import-not-found]
    AnthropicEffort,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # type: ignore[import-not-found]
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # type: ignore[import-not-found]
from vllm.renderers.base import BaseRenderer  # type: ignore[import-not-found]
from vllm.renderers.hf import HfRenderer  # type: ignore[import-not-found]
from vllm.renderers.mistral import MistralRenderer  # type: ignore[import-not-found]
from vllm.renderers.online_renderer import OnlineRenderer  # type: ignore[import-not-found]
from vllm.renderers.params import TokenizeParams  # type: ignore[import-not-found]
from vllm.tokenizers import get_tokenizer, mistral  # type: ignore[import-not-found]
from vllm.utils.mistral import is_mistral_tokenizer  # type: ignore[import-not-found]

CHAT = "/v1/chat/completions"


class Asked(BaseRenderer):  # type: ignore[misc]
    """Has the few settings that vLLM's renderers look at for texts, and asks them."""

    def __init__(self, folder: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.use_unified_vision_chunk = False
        self.model_config = SimpleNamespace(
            **dict.fromkeys(("multimodal_config", "revision", "code_revision", "tokenizer_revision")),
            enable_prompt_embeds=False,
            trust_remote_code=False,
            model=folder,
            tokenizer=folder,
            hf_config=SimpleNamespace(model_type=json.loads((Path(folder) / "config.json").read_text())["model_type"]),
        )

    def ids(self, prompt: dict[str, Any], *, special: bool) -> str:
        params = TokenizeParams(max_total_tokens=None, add_special_tokens=special)
        return _hex(self._tokenize_prompt(prompt, params)["prompt_token_ids"])

    def prepare(self, template: str | None) -> None:
        """Find out what Anthropic's ideas become with this model."""
        own = template or getattr(self.tokenizer, "chat_template", None)
        sources = own.values() if isinstance(own, dict) else [own]
        self.merges = any(map(AnthropicServingMessages._detect_merge_inline_system, sources))
        hi = [{"role": "user", "content": "Hi"}]
        off, *others = (
            self.chat(CHAT, {"messages": hi, "reasoning_effort": effort}, template)
            for effort in ("none", *get_args(AnthropicEffort))
        )
        self.off = "low" if off is None or off in others else "none"

    def chat(self, path: str, body: dict[str, Any], template: str | None) -> str | None:
        read = ChatCompletionRequest.model_validate if path == CHAT else self._message
        try:
            return self._chat(read(copy.deepcopy(body)), template)
        except Exception as error:
            print(f"refused: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
            return None

    def _message(self, body: dict[str, Any]) -> Any:
        return AnthropicServingMessages.to_chat_completion_request(
            AnthropicMessagesRequest.model_validate(body),
            merge_inline_system=self.merges,
            disabled_thinking_effort=self.off,
        )

    def _chat(self, request: Any, template: str | None) -> str:
        return self.ids(self._prompt(request, template, tokenize=False), special=request.add_special_tokens)

    def _prompt(self, request: Any, template: str | None, *, tokenize: bool) -> dict[str, Any]:
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(template, "auto").with_defaults({"tools": tools, "tokenize": tokenize})
        _, prompt = self.render_messages(request.messages, params)
        return dict(prompt)


class Renderer(Asked, HfRenderer):  # type: ignore[misc]
    """By transformers and a template."""


class Mistral(Asked, MistralRenderer):  # type: ignore[misc]
    """By mistral-common, as OnlineRenderer.render_chat calls it."""

    def _chat(self, request: Any, template: str | None) -> str:
        mistral.maybe_serialize_tool_calls(request)
        mistral.truncate_tool_call_ids(request)
        mistral.validate_request_params(request)
        return _hex(self._prompt(request, template, tokenize=True)["prompt_token_ids"])


class Harmony(Renderer):
    """Chats of gpt-oss."""

    def _chat(self, request: Any, template: str | None) -> str:
        online = OnlineRenderer.__new__(OnlineRenderer)
        online.renderer, online.supports_browsing, online.supports_code_interpreter = self, False, False
        _, (prompt,) = online._make_request_with_harmony(request, request.tools is not None)
        return _hex(prompt["prompt_token_ids"])


def _hex(ids: list[int]) -> str:
    return array("I", ids).tobytes().hex()


def renderer_of(folder: str) -> Asked:
    tokenizer = get_tokenizer(folder)
    if is_mistral_tokenizer(tokenizer):
        return Mistral(folder, tokenizer)
    is_harmony = json.loads((Path(folder) / "config.json").read_text())["model_type"] == "gpt_oss"
    return Harmony(folder, tokenizer) if is_harmony else Renderer(folder, tokenizer)


def main() -> None:
    question = json.load(sys.stdin)
    texts = question["texts"]
    for name, folder in question["folders"].items():
        renderer = renderer_of(folder)
        template = question["templates"].get(name)
        renderer.prepare(template)
        answer = {
            "plain": [renderer.ids({"prompt": text}, special=False) for text in texts],
            "special": [renderer.ids({"prompt": text}, special=True) for text in texts],
            "chats": [renderer.chat(path, body, template) for path, body in question["chats"]],
        }
        path = Path(question["answers"]) / f"{name}.json"
        path.with_suffix(".part").write_text(json.dumps(answer))
        path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main()

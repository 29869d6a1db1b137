"""Turn bodies of /v1/responses and /v1/messages into text with vLLM's own code; runs in the vLLM environment.

Called by `test_api_parity.py` as a subprocess, without a server, so that many templates can be compared. Reads JSON
from standard input, {"tokenizer": folder, "templates": {name: source}, "requests": [[path, body]]}, and writes
{name: [text, or null where vLLM refuses]}.
"""

import copy
import json
import os
import sys
from typing import Any, get_args

from render_oracle import ModelConfig, detect  # type: ignore[import-not-found]
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.anthropic.protocol import (  # type: ignore[import-not-found]
    AnthropicEffort,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # type: ignore[import-not-found]
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # type: ignore[import-not-found]
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # type: ignore[import-not-found]
from vllm.entrypoints.openai.responses.utils import (  # type: ignore[import-not-found]
    construct_input_messages,
    construct_tool_dicts,
)
from vllm.renderers.chat_utils import parse_chat_messages  # type: ignore[import-not-found]
from vllm.renderers.hf import safe_apply_chat_template  # type: ignore[import-not-found]


class Renderer:
    """One template as a server would use it."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._format = detect(tokenizer, template)
        self._merges = AnthropicServingMessages._detect_merge_inline_system(template)
        off = self._probe("none")
        efforts = get_args(AnthropicEffort)
        self._off = "low" if off is None or any(self._probe(effort) == off for effort in efforts) else "none"

    def text(self, path: str, body: dict[str, Any]) -> str | None:
        try:
            return self._response(body) if path.endswith("responses") else self._message(body)
        except Exception as error:
            print(f"refused: {error}", file=sys.stderr)
            return None

    def _response(self, body: dict[str, Any]) -> str:
        request = ResponsesRequest.model_validate(copy.deepcopy(body))
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        return self._apply(request, messages, construct_tool_dicts(request.tools, request.tool_choice))

    def _message(self, body: dict[str, Any]) -> str:
        request = AnthropicServingMessages.to_chat_completion_request(
            AnthropicMessagesRequest.model_validate(copy.deepcopy(body)),
            merge_inline_system=self._merges,
            disabled_thinking_effort=self._off,
        )
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        return self._apply(request, request.messages, tools)

    def _probe(self, effort: str) -> str | None:
        messages = [{"role": "user", "content": "Hi"}]
        try:
            return self._apply(ChatCompletionRequest(messages=messages, reasoning_effort=effort), messages, None)
        except Exception:
            return None

    def _apply(self, request: Any, messages: Any, tools: Any) -> str:
        params = request.build_chat_params(self._template, "auto").with_defaults({"tools": tools, "tokenize": False})
        conversation, _, _ = parse_chat_messages(messages, ModelConfig(), self._format)
        kwargs = params.get_apply_chat_template_kwargs()
        return str(safe_apply_chat_template(ModelConfig(), self._tokenizer, conversation, **kwargs))


def main() -> None:
    question = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")  # vLLM logs to standard output
    os.dup2(2, 1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(question["tokenizer"])
    texts = {}
    for name, template in question["templates"].items():
        renderer = Renderer(tokenizer, template)
        texts[name] = [renderer.text(path, body) for path, body in question["requests"]]
    with answers:
        json.dump(texts, answers)


if __name__ == "__main__":
    main()

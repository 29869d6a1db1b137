"""Render chats with vLLM's own code; runs in the vLLM environment, without a server.

Called by `test_chat_template_parity.py` as a subprocess. Reads JSON from standard input,
{"tokenizer": folder, "templates": {name: source}, "requests": [chat completion bodies], "detect": [sources]}, and
writes {"templates": {name: {"format": "string" | "openai", "texts": [text, or null where vLLM refuses]}},
"detected": [format of each source in "detect"]}.
"""

import copy
import json
import os
import sys
from typing import Any

from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # type: ignore[import-not-found]
from vllm.renderers.chat_utils import parse_chat_messages  # type: ignore[import-not-found]
from vllm.renderers.hf import (  # type: ignore[import-not-found]
    resolve_chat_template_content_format,
    safe_apply_chat_template,
)


class ModelConfig:
    """The few settings that rendering text looks at."""

    multimodal_config = None
    enable_prompt_embeds = False
    revision = code_revision = None
    trust_remote_code = False


def detect(tokenizer: Any, template: str) -> str:
    return str(resolve_chat_template_content_format(template, None, "auto", tokenizer, model_config=ModelConfig()))


def render(tokenizer: Any, template: str, content_format: str, body: dict[str, Any]) -> str | None:
    try:
        request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(template, "auto").with_defaults({"tools": tools, "tokenize": False})
        messages, _, _ = parse_chat_messages(request.messages, ModelConfig(), content_format)
        kwargs = params.get_apply_chat_template_kwargs()
        return str(safe_apply_chat_template(ModelConfig(), tokenizer, messages, **kwargs))
    except Exception as error:
        print(f"refused: {error}", file=sys.stderr)
        return None


def main() -> None:
    question = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")  # vLLM logs to standard output
    os.dup2(2, 1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(question["tokenizer"])
    rendered = {}
    for name, template in question["templates"].items():
        content_format = detect(tokenizer, template)
        texts = [render(tokenizer, template, content_format, body) for body in question["requests"]]
        rendered[name] = {"format": content_format, "texts": texts}
    detected = [detect(tokenizer, template) for template in question["detect"]]
    with answers:
        json.dump({"templates": rendered, "detected": detected}, answers)


if __name__ == "__main__":
    main()

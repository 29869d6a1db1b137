"""Load tokenizer folders and tokenize with vLLM's own code; runs in the vLLM environment, without a server.

Called by `folder_comparison.py` as a subprocess. Reads JSON from standard input, {"answers": folder for the answers,
"folders": {name: path}, "templates": {name: chat template, for folders that have none}, "texts": [text], "chats": [chat
completion bodies]}, and writes NAME.json for each folder: {"plain": [ids of each text without special tokens],
"special": [with them], "chats": [ids, or null where vLLM refuses]}. Ids are little-endian uint32 in hexadecimal.
"""

import copy
import json
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # type: ignore[import-not-found]
from vllm.renderers.hf import HfRenderer  # type: ignore[import-not-found]
from vllm.renderers.params import TokenizeParams  # type: ignore[import-not-found]
from vllm.tokenizers import get_tokenizer  # type: ignore[import-not-found]


class Renderer(HfRenderer):  # type: ignore[misc]
    """vLLM's renderer with the few settings that rendering and tokenizing text look at."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = get_tokenizer(folder)
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
        return array("I", self._tokenize_prompt(prompt, params)["prompt_token_ids"]).tobytes().hex()

    def chat(self, body: dict[str, Any], template: str | None) -> str | None:
        try:
            request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
            tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
            params = request.build_chat_params(template, "auto").with_defaults({"tools": tools, "tokenize": False})
            _, prompt = self.render_messages(request.messages, params)
            return self.ids(prompt, special=request.add_special_tokens)
        except Exception as error:
            print(f"refused: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
            return None


def main() -> None:
    question = json.load(sys.stdin)
    texts = question["texts"]
    for name, folder in question["folders"].items():
        renderer = Renderer(folder)
        answer = {
            "plain": [renderer.ids({"prompt": text}, special=False) for text in texts],
            "special": [renderer.ids({"prompt": text}, special=True) for text in texts],
            "chats": [renderer.chat(body, question["templates"].get(name)) for body in question["chats"]],
        }
        path = Path(question["answers"]) / f"{name}.json"
        path.with_suffix(".part").write_text(json.dumps(answer))
        path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main()

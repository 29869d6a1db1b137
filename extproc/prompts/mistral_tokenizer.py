"""Mistral's own tokenizer files, tekken.json and tokenizer.model.v*, read with mistral-common as vLLM's pods do.

vLLM 0.32 uses mistral-common for a folder with one of these files and Mistral's own weights
(vllm/tokenizers/registry.py), whatever else is in it. The library tokenizes texts and renders chats; templates are
ignored. It is an extra, `kvmesh[mistral]`, imported with the first such folder. It takes some 60 MB, plus 100 MB for a
large tekken.json. It reads data and runs no code of the folder. Conversations with media never reach it: it would fetch
their URLs.
"""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from extproc.errors import ChatTemplateError, TokenizerError
from extproc.prompts.engines import Engine, ids_of
from extproc.prompts.token_cache import TokenMemory, key_of
from extproc.requests.chat_messages import call_arguments, function_tools
from extproc.requests.request import ChatPrompt, TokenPrompt

PACKAGE = "mistral_common"
FIRST_VERSION_WITH_EFFORT = 15  # of the tokenizer's format
TEXT_PARTS = frozenset(("text", "thinking"))
LONGEST_CALL_ID = 9  # vLLM keeps the end of longer ids
# arguments of the library's method that template variables (a request's or the server's) would override
NOT_UNDERSTOOD = frozenset(("tokenize", "padding", "truncation", "max_length", "messages", "conversation"))


class MistralEngine(Engine):
    """mistral-common's tokenizer of one file."""

    name = "mistral-common"
    cuts_texts_at_end = True

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the token ids as little-endian uint32. The library treats special tokens in a text as plain text."""
        return TokenPrompt.of(self._tokenizer.encode(text, bos=add_special_tokens, eos=False)).token_bytes

    def decode(self, tokens: bytes) -> str:
        """Return the text of token ids (little-endian uint32), with special tokens spelled out."""
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy  # noqa: PLC0415  an extra

        return str(self._tokenizer.decode(ids_of(tokens), special_token_policy=SpecialTokenPolicy.KEEP))


class MistralChats:
    """Renders conversations of one model; `defaults` are the server's template variables."""

    def __init__(self, mistral: Any, defaults: Mapping[str, Any] | None = None) -> None:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest  # noqa: PLC0415  an extra

        self._mistral = mistral
        _remember_texts(mistral.instruct_tokenizer)
        self._request: Any = ChatCompletionRequest
        self._defaults = dict(defaults or {})
        self._has_effort = int(mistral.version.value.removeprefix("v")) >= FIRST_VERSION_WITH_EFFORT

    def tokens(self, prompt: ChatPrompt) -> bytes:
        """Return the ids (little-endian uint32); raise ChatTemplateError if the library or vLLM refuses the chat."""
        messages = _messages(prompt)
        kwargs = {**self._defaults, **prompt.chat_template_kwargs}
        if unknown := NOT_UNDERSTOOD & kwargs.keys():
            raise ChatTemplateError(f"the template variable {min(unknown)} changes what mistral-common does")
        tools = prompt.chat_template_kwargs.get("tools", function_tools(prompt.tools))
        effort = {"reasoning_effort": kwargs.get("reasoning_effort")} if self._has_effort else {}
        try:
            request = self._request.from_openai(
                messages=messages,
                tools=self._defaults.get("tools") if tools is None else tools,
                continue_final_message=prompt.continue_final_message,
                **effort,
            )
            return TokenPrompt.of(self._mistral.encode_chat_completion(request).tokens).token_bytes
        except Exception as error:  # the library raises anything; its messages may quote the chat
            raise ChatTemplateError(f"mistral-common refuses the conversation: {type(error).__name__}") from None


class MistralFolder(NamedTuple):
    """A folder loaded with mistral-common."""

    engine: MistralEngine
    chats: MistralChats


def has_mistral_file(folder: Path) -> bool:
    """Tell whether pods with `--tokenizer-mode` auto read the folder with mistral-common."""
    weights = _weights(folder)
    if weights and not any(name.startswith("consolidated") for name in weights):
        return False  # vLLM checks the names of the weights; a folder without weights is a copy of the other files
    return any(path.is_file() for path in (folder / "tekken.json", *folder.glob("tokenizer.model.v*")))


def _weights(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.safetensors")]


def why_not_loaded(folder: Path) -> str | None:
    """Return why a folder with `has_mistral_file` cannot be read here and the fix, or None if it can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "the pods read it with mistral-common, not tokenizer.json: pip install 'kvmesh[mistral]'"
    if not _weights(folder) and not (folder / "params.json").is_file():
        return (
            "the pods read it with mistral-common only if its weights are Mistral's own (consolidated*.safetensors), "
            "and nothing says so: if they are, copy params.json, too"
        )
    return None


def load_mistral(folder: Path, *, defaults: Mapping[str, Any] | None = None) -> MistralFolder:
    """Load a folder with `has_mistral_file`; raise TokenizerError naming it and the cause. Takes up to a second."""
    why = why_not_loaded(folder)
    if why is not None:
        raise TokenizerError(
            f"{folder} is not loaded, because {why}; or let the pods be asked (`tokens: render`); if they run with "
            "--tokenizer-mode hf, leave out tekken.json and tokenizer.model.v*"
        )
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # its warnings quote prompts
    try:
        from mistral_common.protocol.instruct.validator import ValidationMode  # noqa: PLC0415  an extra
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # noqa: PLC0415
        from mistral_common.tokens.tokenizers.utils import get_one_valid_tokenizer_file  # noqa: PLC0415

        name = get_one_valid_tokenizer_file(sorted(path.name for path in folder.iterdir()))
        mistral = MistralTokenizer.from_file(str(folder / name), mode=ValidationMode.test)
        engine = MistralEngine(mistral.instruct_tokenizer.tokenizer)
        engine.encode("a", add_special_tokens=True)
        return MistralFolder(engine, MistralChats(mistral, defaults))
    except Exception as error:  # the library raises anything
        raise TokenizerError(
            f"mistral-common cannot load {folder}: {type(error).__name__}: {str(error)[:300]}; copy the folder that "
            "the pods serve again, or let the pods be asked (`tokens: render`)"
        ) from error


def _remember_texts(instruct: Any) -> None:
    """Cache the tokens of each text, and disable the library's decoding of every conversation.

    Decoding fills a field that is unused here and that the library is about to remove. It takes half of the time for a
    new conversation, and nearly all of it for old turns.
    """
    tokenize, memory = instruct.tokenizer.encode, TokenMemory()

    def remembered(s: str, bos: bool, eos: bool) -> list[int]:
        key = key_of(s, kind=bytes((bos, eos)))
        found = memory.get(key)
        if found is None:
            found = TokenPrompt.of(tokenize(s, bos=bos, eos=eos)).token_bytes
            memory.put(key, found)
        return ids_of(found)

    instruct.tokenizer.encode = remembered
    instruct.decode = lambda *_, **__: ""


def _messages(prompt: ChatPrompt) -> list[dict[str, Any]]:
    """Return the messages as vLLM passes them to mistral-common; raise ChatTemplateError if it refuses them."""
    if not prompt.messages:
        raise ChatTemplateError("there are no messages")
    messages = [_message(message) for message in prompt.messages]
    is_assistant = messages[-1].get("role") == "assistant"
    if prompt.add_generation_prompt and (prompt.continue_final_message or is_assistant):
        raise ChatTemplateError("add_generation_prompt must be false where the last message is the assistant's")
    if prompt.continue_final_message and not is_assistant:
        raise ChatTemplateError("continue_final_message needs a last message of the assistant's")
    return messages


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ChatTemplateError("every message must be an object with a role")
    result = dict(message)
    if isinstance(message.get("content"), list):
        result["content"] = _text_parts(message["content"])
    if message.get("role") == "assistant":
        result["tool_calls"] = [_call(call) for call in message.get("tool_calls") or ()]
    elif isinstance(message.get("tool_call_id"), str):
        result["tool_call_id"] = message["tool_call_id"][-LONGEST_CALL_ID:]
    return result


def _text_parts(parts: Sequence[Any]) -> list[Any]:
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise ChatTemplateError("content parts must be text: media have no tokens that are known here")
    return list(parts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        raise ChatTemplateError("tool_calls must be of type function, and have ids")
    # vLLM parses the arguments before it calls the library
    return {
        **call,
        "id": call["id"][-LONGEST_CALL_ID:],
        "function": function | {"arguments": call_arguments(function.get("arguments"))},
    }

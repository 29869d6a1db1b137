"""A plausible day of requests, the same for the same seed: conversations, completions, and every further API form.

Used by `test_prediction.py`. Conversations go on with what the model has answered, so each turn is made when it is
sent: `MixedRequests.next` gives a request, `answered` takes the text that came back.
"""

import random
from typing import Any

from tests.vllm.checked_client import CHAT, COMPLETION, MESSAGES, RESPONSES
from tests.vllm.servers import BLOCK_SIZE

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": "Tell the tide of a harbour.",
            "parameters": {"type": "object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]},
        },
    }
]
CHATS, DOCUMENTS, SALTS = 6, 4, 2
MOST_MESSAGES = 13  # then a conversation begins anew
# how often each kind comes
KINDS = {
    "chat": 6,
    "streamed chat": 3,
    "chat with tools": 2,
    "salted chat": 2,
    "continued chat": 1,
    "completion": 4,
    "streamed completion": 2,
    "token ids": 3,
    "whole blocks": 2,
    "cut completion": 1,
    "batch": 1,
    "response": 3,
    "message": 3,
}


class MixedRequests:
    """Makes the requests; `unique` sets their prompts apart from those of all other runs."""

    def __init__(self, *, seed: int, unique: str) -> None:
        self._draw = random.Random(seed)
        self._unique = unique
        self._chats: dict[str, list[dict[str, Any]]] = {}
        self._documents = [f"{unique} document {i}. {self._words(120)}" for i in range(DOCUMENTS)]
        self._ids = [[self._draw.randrange(300, 4000) for _ in range(5 * BLOCK_SIZE)] for _ in range(DOCUMENTS)]
        self._asked: list[dict[str, Any]] | None = None  # the conversation that waits for its answer

    def next(self) -> tuple[str, str, dict[str, Any]]:
        """Return the kind, the path and the fields of the next request."""
        (kind,) = self._draw.choices(list(KINDS), weights=list(KINDS.values()))
        self._asked = None
        if "chat" in kind:
            return kind, CHAT, self._chat(kind)
        if kind == "response":
            fields = {"instructions": self._documents[0], "input": self._words(12), "max_output_tokens": 1}
            return kind, RESPONSES, fields
        if kind == "message":
            messages = [{"role": "user", "content": self._words(12)}]
            return kind, MESSAGES, {"system": self._documents[1], "messages": messages, "max_tokens": 1}
        return kind, COMPLETION, self._completion(kind)

    def answered(self, text: str) -> None:
        """Go on with the conversation that was asked last."""
        if self._asked is not None:
            self._asked.append({"role": "assistant", "content": text})

    def _chat(self, kind: str) -> dict[str, Any]:
        number = self._draw.randrange(SALTS if kind == "salted chat" else CHATS)
        name = f"{kind if kind in ('salted chat', 'chat with tools') else 'chat'} {number}"
        messages = self._chats.get(name, [])
        if not 0 < len(messages) < MOST_MESSAGES:
            messages = self._chats[name] = [{"role": "system", "content": f"{self._unique} {name}: {self._words(40)}"}]
        messages.append({"role": "user", "content": self._words(self._draw.randrange(5, 40))})
        fields: dict[str, Any] = {"messages": list(messages), "max_tokens": self._draw.randrange(1, 12)}
        if kind == "continued chat":
            begun = [*messages, {"role": "assistant", "content": self._words(6)}]
            fields |= {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
            messages.pop()
        else:
            self._asked = messages
        if kind == "streamed chat":
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if kind == "chat with tools":
            fields |= {"tools": TOOLS, "tool_choice": "none"}
        if kind == "salted chat":
            fields["cache_salt"] = f"salt {number}"
        return fields | {"return_token_ids": True}

    def _completion(self, kind: str) -> dict[str, Any]:
        document = self._draw.choice(self._documents)
        fields: dict[str, Any] = {"max_tokens": self._draw.randrange(1, 12), "return_token_ids": True}
        if kind == "token ids":
            ids = self._draw.choice(self._ids)
            fields["prompt"] = ids[: self._draw.randrange(1, len(ids))]
        elif kind == "whole blocks":
            ids = self._draw.choice(self._ids)
            fields["prompt"] = ids[: BLOCK_SIZE * self._draw.randrange(1, 6)]
        elif kind == "cut completion":
            fields |= {"prompt": document, "truncate_prompt_tokens": self._draw.choice((64, 100))}
        elif kind == "batch":
            # of different documents: that one prompt hits what the other has just computed is chance
            fields["prompt"] = [f"{each} {self._words(3)}" for each in self._draw.sample(self._documents, 2)]
        else:
            fields["prompt"] = f"{document} {self._words(self._draw.randrange(20))}"
        if kind == "streamed completion":
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return fields

    def _words(self, count: int) -> str:
        return " ".join(self._draw.choice(WORDS) for _ in range(count))


WORDS = (
    *("harbour", "wave", "naïve", "tide", "字", "rope", "sail", "42", "{gull}", "storm\n"),
    *("anchor", "—", "buoy", "keel,", "deck.", "mast", "Ebbe", "Flut", "👍"),
)

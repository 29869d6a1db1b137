"""The guide's proxy knows prompts by their text."""

import msgspec

from bench.routing.guide_router import prompt_bytes
from bench.routing.llm_d_guide import BLOCK_BYTES, block_keys


def chat(*texts: str) -> bytes:
    return msgspec.json.encode({"messages": [{"role": "user", "content": text} for text in texts]})


def test_a_longer_chat_has_the_keys_of_its_beginning() -> None:
    start, longer = prompt_bytes(chat("x" * 3000)), prompt_bytes(chat("x" * 3000, "y" * 3000))
    whole_blocks = len(start) // BLOCK_BYTES

    assert block_keys(longer)[:whole_blocks] == block_keys(start)[:whole_blocks]
    assert len(block_keys(start)) == whole_blocks + 1
    assert prompt_bytes(msgspec.json.encode({"prompt": "x"})) == b"x"

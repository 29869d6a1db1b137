"""What `kvmesh up` prints for people to copy."""

import json
import shlex

from extproc.local.greeting import example_commands


def test_the_examples_are_a_chat_its_repeat_and_a_streamed_completion_that_a_shell_understands() -> None:
    commands = [shlex.split(line) for line in example_commands("http://127.0.0.1:10000", model="tiny")]

    assert [words[:5] for words in commands] == [
        ["curl", "-si", f"http://127.0.0.1:10000{path}", "-H", "content-type: application/json"]
        for path in ("/v1/chat/completions", "/v1/chat/completions", "/v1/completions")
    ]
    chat, repeat, completion = (json.loads(words[6]) for words in commands)
    assert chat == repeat
    assert {chat["model"], completion["model"]} == {"tiny"}
    assert completion["stream"] is True


def test_the_chat_is_long_enough_to_fill_blocks_of_the_prefix_cache() -> None:
    chat = json.loads(shlex.split(example_commands("http://x", model="tiny")[0])[6])

    # about 1.3 tokens a word at the least; vLLM's blocks have 16 tokens, on the CPU 32
    assert sum(len(message["content"].split()) for message in chat["messages"]) > 2 * 32 / 1.3

"""What `kvmesh up` prints for people to copy."""

import json
import shlex
from io import StringIO

from rich.console import Console

from extproc.local.greeting import example_commands, greeting, lines_on_screen


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


FACTS: dict[str, object] = {
    "gateway": "http://127.0.0.1:10000",
    "admin": "http://127.0.0.1:9090",
    "extproc": "127.0.0.1:9002",
    "indexer_admin": "http://127.0.0.1:9091",
    "envoy_admin": "http://127.0.0.1:9901",
    "redis": "redis://127.0.0.1:7000/0",
    "endpoints": ["[fe80::1]:8000", "127.0.0.1:8102"],
}


def printed(*notes: str) -> list[str]:
    console = Console(file=StringIO(), width=80)
    for line in greeting(FACTS, log_directory="/tmp/[/up]", model="tiny", notes=notes):
        console.print(line, soft_wrap=True)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_the_greeting_tells_every_address_as_it_is() -> None:
    assert printed("no tokenizer: [/x]")[:10] == [
        "kvmesh is up",
        "no tokenizer: [/x]",
        "gateway        http://127.0.0.1:10000  (send requests here)",
        "picker admin   http://127.0.0.1:9090  (a page for the browser; /state /metrics)",
        "picker gRPC    127.0.0.1:9002  (ext_proc)",
        "indexer admin  http://127.0.0.1:9091  /metrics /readyz",
        "Envoy admin    http://127.0.0.1:9901",
        "Redis          redis://127.0.0.1:7000/0",
        "pods           [fe80::1]:8000, 127.0.0.1:8102",
        "logs           /tmp/[/up]  (until the end)",
    ]


def test_the_greeting_leaves_room_for_pods_and_decisions_on_a_terminal_of_45_lines() -> None:
    lines = greeting(FACTS, log_directory="/tmp/kvmesh-up-abcdefgh", model="tiny", notes=())

    assert [lines_on_screen(lines, width=width) for width in (80, 120)] == [30, 25]

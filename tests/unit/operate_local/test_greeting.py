"""What `kvmesh up` prints for people to copy."""

import shlex
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.text import Text

from operate.local.greeting import EXAMPLES, SYSTEM_PROMPT, greeting, lines_on_screen


def test_the_examples_are_a_cold_chat_its_follow_up_and_another_question_below_the_same_instructions() -> None:
    cold, warm, shared = (example.body("tiny")["messages"] for example in EXAMPLES)
    assert isinstance(cold, list)
    assert isinstance(warm, list)
    assert isinstance(shared, list)

    assert warm[: len(cold)] == cold
    assert [message["role"] for message in warm] == ["system", "user", "assistant", "user"]
    assert shared[0] == cold[0]
    assert shared[1] != cold[1]
    assert len({example.file for example in EXAMPLES}) == 3


def test_the_instructions_are_long_enough_to_fill_blocks_of_the_prefix_cache() -> None:
    # about 1.3 tokens a word at the least; vLLM's blocks have 16 tokens, on the CPU 32
    assert len(SYSTEM_PROMPT.split()) > 32 / 1.3


def test_the_commands_are_understood_by_a_shell_wherever_the_files_are() -> None:
    commands = [line for line in printed(width=1000) if line.startswith("curl")]

    assert [shlex.split(line) for line in commands] == [
        [
            *("curl", "-si", "http://127.0.0.1:10000/v1/chat/completions", "-H", "content-type: application/json"),
            *("-d", f"@/tmp/[/up dir]/{example.file}"),
        ]
        for example in EXAMPLES
    ]


FACTS: dict[str, object] = {
    "gateway": "http://127.0.0.1:10000",
    "admin": "http://127.0.0.1:9090",
    "extproc": "127.0.0.1:9002",
    "indexer_admin": "http://127.0.0.1:9091",
    "envoy_admin": "http://127.0.0.1:9901",
    "redis": "redis://127.0.0.1:7000/0",
    "endpoints": ["[fe80::1]:8000", "127.0.0.1:8102"],
    "pids": {"redis": 11, "pod-0": 12, "pod-1": 13, "envoy": 14, "extproc": 15},
}


def lines_of(facts: Mapping[str, object] = FACTS, *, notes: Sequence[str] = (), **given: Any) -> list[Text]:
    usual: dict[str, Any] = {"log_directory": "/tmp/[/up dir]", "load": "kvmesh load --beside round-robin"}
    return greeting(facts, notes=notes, **(usual | given))


def printed(*notes: str, width: int = 80, **given: Any) -> list[str]:
    console = Console(file=StringIO(), width=width)
    for line in lines_of(notes=notes, **given):
        console.print(line, soft_wrap=True)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_the_greeting_tells_every_address_as_it_is() -> None:
    assert printed("no tokenizer: [/x]")[:12] == [
        "kvmesh is up",
        "no tokenizer: [/x]",
        "gateway        http://127.0.0.1:10000  (send requests here)",
        "picker admin   http://127.0.0.1:9090  (a page for the browser; /state /metrics)",
        "picker gRPC    127.0.0.1:9002  (ext_proc)",
        "indexer admin  http://127.0.0.1:9091  /metrics /readyz",
        "Envoy admin    http://127.0.0.1:9901",
        "Redis          redis://127.0.0.1:7000/0",
        "pods           [fe80::1]:8000, 127.0.0.1:8102",
        "logs           /tmp/[/up dir]  (until the end)",
        "kill picker    pkill -9 -P 15  (it is back at once)",
        "kill a pod     kill -9 12  (pod-0; it is back some seconds later, with an empty cache)",
    ]


def test_the_greeting_offers_a_load() -> None:
    assert "kvmesh load --beside round-robin" in printed()


def test_real_pods_are_not_offered_to_be_killed() -> None:
    facts = FACTS | {"pids": {"redis": 1, "envoy": 2, "extproc": 3}}
    assert not any("kill a pod" in line.plain for line in lines_of(facts))


def test_the_greeting_leaves_room_for_pods_and_decisions_on_a_terminal_of_45_lines() -> None:
    lines = lines_of(log_directory="/tmp/kvmesh-up-abcdefgh")

    assert [lines_on_screen(lines, width=width) for width in (80, 120)] == [30, 26]

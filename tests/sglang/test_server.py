"""A real SGLang server behind the real stack: tokens and hits are as predicted, whoever makes the tokens."""

import asyncio
import json
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from extproc.prompts.folder_checks import TOOLS
from tests.e2e.stack import Answer, Stack, eventually, running_stack
from tests.sglang.environment import ensure_sglang
from tests.sglang.server import MODEL_NAME, PAGE, SglangServer, sglang_server
from tests.sglang.test_sglang import TOKENIZER
from tests.vllm.environment import ensure_environment, ensure_model

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SERVER_SECONDS = 600.0  # of a test that may start the server
PATIENT = "index_timeout_ms: 2000\nrender_timeout_ms: 5000\n"
pytestmark = pytest.mark.timeout(SERVER_SECONDS)


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_model(ensure_environment(), tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    python = ensure_sglang(ensure_environment())
    with sglang_server(python, model, tmp_path_factory.mktemp("server")) as server:
        yield server


def text(words: int) -> str:
    """Return a text that shares no page with any other."""
    return f"{uuid.uuid4()} " + " ".join(f"the {i}th wave reached the harbour" for i in range(words))


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversation() -> list[dict[str, str]]:
    return [says("system", text(8)), says("user", text(4))]


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": text(20)}),
    "token ids": (COMPLETIONS, {"prompt": list(range(100, 300))}),
    "chat": (CHATS, {"messages": conversation()}),
    "content in parts": (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": text(12)}]}]}),
    "tools": (CHATS, {"messages": conversation(), "tools": TOOLS}),
    "an assistant's message at the end": (CHATS, {"messages": [*conversation(), says("assistant", text(4))]}),
    "to be continued": (
        CHATS,
        {"messages": [*conversation(), says("assistant", text(4))], "continue_final_message": True},
    ),
    "to be continued, as vLLM wants it": (
        CHATS,
        {
            "messages": [*conversation(), says("assistant", text(4))],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    "no generation prompt": (CHATS, {"messages": conversation(), "add_generation_prompt": False}),
}


def differs(state: Any) -> bool:
    """Whether the picker has found that its folder's tokens are not the pod's."""
    return bool(state["token_states"].get(MODEL_NAME, [""])[0] == "differs")


async def served(stack: Stack, path: str, body: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """Send a request; return its answer and the picker's decision."""
    answer = await stack.send("POST", path, json={"model": MODEL_NAME, "max_tokens": 4, "temperature": 0, **body})
    assert answer.status == 200, answer.body
    return answer, (await stack.state())["decisions"][0]


@pytest.mark.parametrize("tokens", ["folder", "pods"])
async def test_every_form_has_the_server_s_tokens_and_its_hit(
    server: SglangServer, model: Path, tokens: str, tmp_path: Path
) -> None:
    settings, flags = PATIENT, ["--model", MODEL_NAME, "--tokenizer", str(model)]
    if tokens == "pods":
        settings, flags = f"{PATIENT}policy: {{models: {{served: [{{name: {MODEL_NAME}, tokens: auto}}]}}}}\n", []
    seen: dict[str, tuple[int, int, list[str]]] = {}
    right: dict[str, tuple[int, int, list[str]]] = {}
    async with running_stack(tmp_path, *flags, settings=settings, endpoints=[server.address]) as stack:
        if tokens == "folder":  # its tools differ from SGLang's, so the pods are asked
            await eventually(stack.state, differs, seconds=60.0)
        for form, (path, body) in FORMS.items():
            first, _ = await served(stack, path, body)
            length = first.json["usage"]["prompt_tokens"]
            whole = (length - 1) // PAGE * PAGE

            def is_held(explanation: Any, whole: int = whole) -> bool:
                return bool(explanation["candidates"][0]["matched_tokens"] == whole)

            await eventually(partial(stack.explain, {"model": MODEL_NAME, **body}, path=path), is_held)
            again, decision = await served(stack, path, body)
            seen[form] = decision["prompt_tokens"], decision["matched_tokens"], decision["degraded"]
            right[form] = length, again.cached_tokens, []
    assert seen == right


async def test_conversations_hit_as_predicted(server: SglangServer, model: Path, tmp_path: Path) -> None:
    flags = "--model", MODEL_NAME, "--tokenizer", str(model)
    async with running_stack(tmp_path, *flags, settings=PATIENT, endpoints=[server.address]) as stack:
        chats = [conversation() for _ in range(5)]
        hits = []
        for _ in range(4):
            for messages in chats:
                answer, decision = await served(stack, CHATS, {"messages": messages})
                hits.append((decision["matched_tokens"], answer.cached_tokens))
                messages.append(says("assistant", answer.json["choices"][0]["message"]["content"]))
                messages.append(says("user", text(3)))
                await asyncio.sleep(0.3)  # what follows is asked when the index has the last answer
    assert [predicted for predicted, _ in hits] == [cached for _, cached in hits]
    assert sum(cached > 0 for _, cached in hits) >= 15


async def findings(stack: Stack) -> dict[str, str]:
    """Return what the doctor finds, by check."""
    command = [sys.executable, "-m", "operate", "doctor", "--picker", stack.ready["admin"], "--no-trial"]
    command += ["--output", "json"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, said = await process.communicate()
    assert process.returncode in (0, 1, 2), said.decode()
    return {each["check"]: each["seen"] for each in json.loads(output) if each["severity"] != "ok"}


async def test_the_doctor_asks_no_vllm_s_questions(server: SglangServer, tmp_path: Path) -> None:
    settings = f"{PATIENT}policy: {{models: {{served: [{{name: {MODEL_NAME}, tokens: auto}}]}}}}\n"
    async with running_stack(tmp_path, settings=settings, endpoints=[server.address]) as stack:
        await served(stack, *FORMS["chat"])
        assert await findings(stack) == {}

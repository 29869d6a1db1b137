"""What vLLM and we make of the folders of real models: the same texts and chats through both, compared id by id."""

import contextlib
import json
import random
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from extproc.errors import PromptTokensError
from extproc.prompts.engines import Engine, probe_texts
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.prompts.tokenizer_folder import read_folder
from extproc.requests.openai import parse_request
from tests.vllm.environment import VllmEnvironment, offline
from tests.vllm.random_chats import random_chats

HERE = Path(__file__).parent
ORACLE_SECONDS = 400.0
# the pods' --chat-template, for the folders that have none
TEMPLATES = {
    "gemma2": "instruction_style",
    "yi": "thinking_style",
    "gpt4o": "parts_style",
    "sentencepiece": "header_style",
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where, “quoted” & <b>"},
        "days": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}}
]
CALL = {"id": "call_1aB2c3", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
# as Cohere's templates have them
OTHER_TOOLS = [
    {"name": "weather", "description": "d", "parameter_definitions": {"city": {"type": "str", "description": "c"}}}
]


def texts() -> list[str]:
    """Short and awkward ones, the probe of the engines, and random ones of many scripts."""
    source = random.Random(20261125)
    alphabet = [
        *"abcXYZ 0123456789.,;:!?'\"()[]{}<>|/\\\n\t\r_-+=*&%$#@~^`",
        *"éßøñçİŀﬁ½²―“”…\u00a0\u2003\u200b\ufeff\u0301日本語中文한국어ไทยहिन्दीעבריתعربيةΕλлКи👍🏽🇩🇪👩\u200d\x00\x7f\u2028▁Ġ",
        *(" ", "  ", "\n\n", "    ", "the ", "The", " don't", "'LL", "123456", "</s>", "<|im_end|>", "<bos>", "[INST]"),
    ]
    drawn = ["".join(source.choices(alphabet, k=source.choice([1, 3, 10, 40, 200]))) for _ in range(90)]
    marks = ("<|im_start|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>", "<start_of_turn>", "<｜User｜>", "[/INST]", "<s>")
    return ["", " ", "\n", "Hello", " Hello", "  Hello  ", "▁Hello", *drawn, *probe_texts(marks), "word " * 3000]


def chats() -> list[dict[str, Any]]:
    """Every awkward chat, random ones, tools in all positions, and what switches thinking."""
    awkward = [case["request"] for case in json.loads((HERE.parent / "data" / "awkward_chats.json").read_text())]
    user = {"role": "user", "content": "What is the weather in Zürich?"}
    used: list[dict[str, Any]] = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": '{"degrees": 21.5}'},
    ]
    answered = [*used, {"role": "assistant", "content": "21.5 °C"}, {"role": "user", "content": "Thanks"}]
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt rains.", "reasoning": "hm"}
    conversations = [[user], [{"role": "system", "content": "Be brief."}, user], used, answered, [user, thought, user]]
    switches: list[dict[str, Any]] = [
        {},
        *(
            {"chat_template_kwargs": {name: value}}
            for name in ("enable_thinking", "thinking")
            for value in (True, False)
        ),
        *({"reasoning_effort": effort} for effort in ("none", "low", "high")),
        {"add_generation_prompt": False},
    ]
    tools: list[dict[str, Any]] = [
        {},
        {"tools": TOOLS},
        {"tools": []},
        {"tools": TOOLS, "chat_template_kwargs": {"tools": None}},
        {"chat_template_kwargs": {"tools": OTHER_TOOLS}},
        {"tools": TOOLS, "chat_template_kwargs": {"tools": OTHER_TOOLS}},
        {"tools": TOOLS, "tool_choice": "none"},
    ]
    combined = [
        {"messages": messages, **switch, **tool, "chat_template_kwargs": _variables(switch) | _variables(tool)}
        for messages in conversations
        for switch in switches
        for tool in tools
    ]
    return [*awkward, *combined, *random_chats(400, seed=20261125)]


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    return dict(body.get("chat_template_kwargs", {}))


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One folder. `different` has the beginnings of what was not equal."""

    name: str
    engine: str
    texts: int = 0  # twice each: with special tokens and without
    chats: int = 0  # those that vLLM renders
    refused: int = 0  # chats that vLLM answers with an error
    different: list[str] = field(default_factory=list)


class Oracle:
    """vLLM's answers, folder by folder; they come while ours are made."""

    def __init__(self, process: "subprocess.Popen[str]", answers: Path, log: Path) -> None:
        self._process, self._answers, self._log = process, answers, log

    def answer(self, name: str) -> dict[str, list[str | None]]:
        """Wait for one folder's answer."""
        path = self._answers / f"{name}.json"
        give_up_at = time.monotonic() + ORACLE_SECONDS
        while not path.exists():
            ended = self._process.poll()
            if (ended is not None and not path.exists()) or time.monotonic() > give_up_at:
                raise AssertionError(f"vLLM has no answer for {name} ({ended}): {self._log.read_text()[-2000:]}")
            time.sleep(0.1)
        answer: dict[str, list[str | None]] = json.loads(path.read_text())
        return answer


@contextlib.contextmanager
def running_oracle(environment: VllmEnvironment, folders: Mapping[str, Path], scratch: Path) -> Iterator[Oracle]:
    """Ask vLLM for everything about these folders, in one process."""
    question = {
        "answers": str(scratch),
        "folders": {name: str(path) for name, path in folders.items()},
        "templates": {name: template.read_text() for name in folders if (template := template_of(name))},
        "texts": texts(),
        "chats": chats(),
    }
    (scratch / "question.json").write_text(json.dumps(question))
    log = scratch / "oracle.log"
    with (scratch / "question.json").open() as asked, log.open("w") as said:
        process = subprocess.Popen(
            [str(environment.python), str(HERE / "folder_oracle.py")],
            stdin=asked,
            stdout=said,
            stderr=said,
            text=True,
            env=offline() | {"VLLM_LOGGING_LEVEL": "CRITICAL", "TRANSFORMERS_VERBOSITY": "critical"},
        )
    try:
        yield Oracle(process, scratch, log)
    finally:
        process.kill()
        process.wait()


def template_of(name: str) -> Path | None:
    """Return the chat template file of a folder that has none itself."""
    return HERE / "templates" / f"{TEMPLATES[name]}.jinja" if name in TEMPLATES else None


def compare(name: str, folder: Path, oracle: Oracle, *, as_written: bool = False) -> Comparison:
    """Load the folder as the picker does, and compare all that vLLM answered with what each engine makes."""
    read = read_folder(folder, chat_template=template_of(name), as_written=as_written)
    ours = ModelTokenizer.of_folder(read)
    reference = Engine(read.backend)
    result = Comparison(name=name, engine=ours.engine)
    theirs = oracle.answer(name)
    for kind, special in (("plain", False), ("special", True)):
        for text, ids in zip(texts(), theirs[kind], strict=True):
            body = {"prompt": text, "add_special_tokens": special}
            made = {_ids(ours, "/v1/completions", body), reference.encode(text, add_special_tokens=special).hex()}
            if made != {ids}:
                result.different.append(f"text, {kind}: {text[:60]!r}")
    result.texts = len(texts())
    for body, ids in zip(chats(), theirs["chats"], strict=True):
        if ids is None:  # its checks are not ours to repeat
            result.refused += 1
        else:
            result.chats += 1
            if _ids(ours, "/v1/chat/completions", body) != ids:
                result.different.append(f"chat: {json.dumps(body, ensure_ascii=False)[:600]}")
    return result


def _ids(tokenizer: ModelTokenizer, path: str, body: Mapping[str, Any]) -> str | None:
    request = parse_request(path=path, body=json.dumps(body).encode())
    try:
        (buffer,) = tokenizer.token_buffers(request)
    except PromptTokensError:
        return None
    return buffer.hex()

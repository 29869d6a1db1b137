"""Our chat templates render what vLLM's own code renders, for templates in the style of the well-known ones."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import ChatTemplateError
from extproc.prompts.chat_template import ChatTemplate
from extproc.requests.openai import parse_request
from extproc.requests.request import ChatPrompt
from tests.data.content_formats import CONTENT_FORMATS
from tests.vllm.environment import VllmEnvironment, offline
from tests.vllm.random_chats import random_chats

HERE = Path(__file__).parent
AWKWARD = json.loads((HERE.parent / "data" / "awkward_chats.json").read_text())
RANDOM = random_chats(400, seed=20261121)
TEMPLATES = {path.stem: path.read_text() for path in sorted((HERE / "templates").glob("*.jinja"))}
SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|eos|>"}


@pytest.fixture(scope="module")
def vllm_answer(vllm_environment: VllmEnvironment, tiny_model: Path) -> dict[str, Any]:
    """What vLLM makes of every chat with every template; see `render_oracle`."""
    question = {
        "tokenizer": str(tiny_model),
        "templates": TEMPLATES,
        "requests": [case["request"] for case in AWKWARD] + RANDOM,
        "detect": [source for source, _ in CONTENT_FORMATS],
    }
    done = subprocess.run(
        [str(vllm_environment.python), str(HERE / "render_oracle.py")],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        env=offline(),
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def our_text(template: ChatTemplate, body: dict[str, Any]) -> str | None:
    (prompt,) = parse_request(path="/v1/chat/completions", body=json.dumps(body).encode()).prompts
    assert isinstance(prompt, ChatPrompt)
    try:
        return template.render(prompt)
    except ChatTemplateError:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_awkward_chat_renders_as_in_vllm(name: str, vllm_answer: dict[str, Any]) -> None:
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS)
    ours = {case["name"]: our_text(template, case["request"]) for case in AWKWARD}
    theirs = dict(zip(ours, vllm_answer["templates"][name]["texts"], strict=False))
    assert ours == theirs
    assert template.content_format == vllm_answer["templates"][name]["format"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_random_chat_that_vllm_accepts_renders_as_in_vllm(name: str, vllm_answer: dict[str, Any]) -> None:
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS)
    theirs = vllm_answer["templates"][name]["texts"][len(AWKWARD) :]
    # where vLLM answers 400 the text does not matter: its checks are not ours to repeat
    different = [
        body for body, text in zip(RANDOM, theirs, strict=True) if text is not None and our_text(template, body) != text
    ]
    assert different == []


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"sandbox_style"}))
def test_the_comparison_is_about_texts_and_not_about_refusals(name: str, vllm_answer: dict[str, Any]) -> None:
    texts = vllm_answer["templates"][name]["texts"]
    assert sum(text is not None for text in texts[: len(AWKWARD)]) > 50
    assert sum(text is not None for text in texts[len(AWKWARD) :]) > 50


def test_the_recorded_content_formats_are_vllms(vllm_answer: dict[str, Any]) -> None:
    assert vllm_answer["detected"] == [content_format for _, content_format in CONTENT_FORMATS]

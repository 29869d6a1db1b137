"""Large prompts are tokenized beside the event loop, bounded in number and time."""

import asyncio
import threading
from pathlib import Path

import pytest

from extproc.adapters.prompt_tokens import PromptTokens
from extproc.adapters.tokenizer import ModelTokenizer
from extproc.core.request import InferenceRequest
from extproc.errors import PromptTooLargeError
from extproc.wire.openai import parse_request

TINY_MODEL = Path(__file__).parents[2] / "podsim" / "tiny_model"


class Stuck(ModelTokenizer):
    """A tokenizer that goes on only when told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.threads: set[str] = set()

    @property
    def thread_above_bytes(self) -> int:
        return 100

    def token_buffers(self, request: InferenceRequest, *, limit: int | None = None) -> tuple[bytes, ...]:
        self.threads.add(threading.current_thread().name)
        self.go_on.wait(10)
        return (b"abcd",)


def request(text: str) -> InferenceRequest:
    return parse_request(path="/v1/completions", body=b'{"prompt": "' + text.encode() + b'"}')


LARGE = request("x" * 200)


async def test_a_prompt_that_takes_too_long_is_given_up() -> None:
    stuck = Stuck()
    source = PromptTokens(stuck, timeout_seconds=0.01)
    with pytest.raises(PromptTooLargeError, match=r"longer than 0.01 s"):
        await source.tokens(LARGE, limit=1)
    stuck.go_on.set()
    source.close()


async def test_too_many_large_prompts_are_refused_and_taken_again_later() -> None:
    stuck = Stuck()
    source = PromptTokens(stuck, max_waiting=2)
    waiting = [asyncio.create_task(source.tokens(LARGE, limit=1)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(PromptTooLargeError, match="2 other large prompts"):
        await source.tokens(LARGE, limit=1)
    stuck.go_on.set()
    assert await asyncio.gather(*waiting) == [(b"abcd",)] * 2
    assert await source.tokens(LARGE, limit=1) == (b"abcd",)
    assert all(name.startswith("large-prompts") for name in stuck.threads)
    source.close()


async def test_only_the_first_prompts_are_tokenized() -> None:
    source = PromptTokens(ModelTokenizer.load(TINY_MODEL))
    many = parse_request(path="/v1/completions", body=b'{"prompt": ["a", "b", "c"]}')
    assert len(await source.tokens(many, limit=2)) == 2
    source.close()

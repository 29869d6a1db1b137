"""Pages of megabytes that cost most to read: open quotes, labels without end, lines that nearly match, long lists."""

import asyncio
import itertools

from tests.attack.raw_pod import page, raw_pod
from tests.attack.target import Target

SIZE = (4 << 20) - 1024
LINE = 30_000
LOAD = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n"


def of(line: bytes) -> bytes:
    """Return a page full of a line."""
    return page(LOAD + line * (SIZE // len(line)))


METRICS = (
    of(b"vllm:cache_config_info{" + b'a="",' * (LINE // 5) + b"} 1\n"),
    of(b"vllm:cache_config_info{" + b'a="\\' * (LINE // 4) + b"} 1\n"),
    page(LOAD + b"_sum " * (SIZE // 5)),
    page(LOAD + b'vllm:cache_config_info{a="' + b"b" * SIZE + b"} 1\n"),
    page(LOAD + b'vllm:lora_requests_info{running_lora_adapters="' + b"a,b," * (SIZE // 4) + b'"} 1\n'),
    of(b"vllm:num_requests_waitin\n"),
    page(LOAD + b"".join(b'vllm:time_to_first_token_seconds_bucket{le="%d"} 1\n' % bound for bound in range(16_000))),
)
MODELS = (
    page(b'{"data":[' + b'{"id":"a"},' * 80_000 + b'{"id":"b"}]}'),
    page(b'{"data":[' + b",".join(b'{"id":"a%d","max_model_len":%d}' % (n, n + 1) for n in range(8000)) + b"]}"),
    page(b'{"data":[{"id":"a","max_model_len":' + b"9" * 1_000_000 + b"}]}"),
)
SOURCES = page(b"{" + b",".join(b'"%d":null' % rank for rank in range(20_000)) + b"}")


async def attack(target: Target) -> None:
    """Answer each question with the next of its pages."""
    target.begin()
    metrics, models = itertools.cycle(METRICS), itertools.cycle(MODELS)

    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        pages = {"/metrics": metrics, "/v1/models": models}.get(path, itertools.repeat(SOURCES))
        writer.write(next(pages))

    async with raw_pod(target, answer):
        await asyncio.Event().wait()

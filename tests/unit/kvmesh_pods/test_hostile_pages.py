"""Whatever a pod's page holds, it is read in small steps, or refused with what is wrong with it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.pods.engine_metrics import parse_latencies, parse_load, parse_pod_report
from kvmesh.pods.metrics_page import MAX_LINE_BYTES, MOST_MODELS, MOST_SERIES, PIECE_BYTES, STEP_BYTES
from kvmesh.pods.page_steps import Steps, UnreadablePageError, at_once
from kvmesh.pods.page_turns import FREE_SECONDS, SHARE, PageTurns

SIZE = 1 << 20
LINE = 30_000
LOAD = b"vllm:num_requests_waiting 2\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.5\n"
READERS: dict[str, Callable[[bytes], Steps[Any]]] = {
    "load": lambda page: parse_load(page, reported_at=0.0),
    "report": lambda page: parse_pod_report(page, scraped_at=0.0),
    "latencies": parse_latencies,
}


def lines(line: bytes) -> bytes:
    return LOAD + line * (SIZE // len(line))


PAGES = {
    "words": lines(b"_sum " * (LINE // 5) + b"\n"),
    "no-label": lines(b"vllm:lora_requests_info{" + b"a" * LINE + b"} 1\n"),
    "unclosed-quotes": lines(b"vllm:cache_config_info{" + b'a="\\' * (LINE // 4) + b"} 1\n"),
    "one-quote": lines(b'vllm:cache_config_info{a="' + b"b" * LINE + b"} 1\n"),
    "escapes": lines(b'vllm:cache_config_info{a="' + b"\\b" * (LINE // 2) + b"} 1\n"),
    "labels": lines(b"vllm:cache_config_info{" + b'a="",' * (LINE // 5) + b"} 1\n"),
    "almost": lines(b"vllm:num_requests_waitin\n"),
    "braces": lines(b"vllm:num_requests_waiting{" + b"} " * (LINE // 2) + b"\n"),
    "spaces": lines(b"vllm:num_requests_waiting" + b" " * LINE + b"\n"),
    "digits": lines(b"vllm:num_requests_waiting " + b"1" * LINE + b"\n"),
    "help": lines(
        b"vllm:gpu_prefix_cache_queries_total 1\n# HELP vllm:gpu_prefix_cache_hits " + b"block " * (LINE // 6) + b"\n"
    ),
    "ranks": (b"sglang:num_queue_reqs{" + b'tp_rank="a",' * (LINE // 12) + b"} 1\n") * 34,
    "open-ranks": (b"sglang:num_queue_reqs{" + b'tp_rank="' * (LINE // 9) + b"} 1\n") * 34,
    "many-ranks": b'sglang:num_queue_reqs{tp_rank="1"} 1\n' * 15_000,
    "buckets": LOAD + b'vllm:time_to_first_token_seconds_bucket{le="1"} 1\n' * 15_000,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_any_kind_is_read_in_steps_that_its_length_bounds(page: str, reader: str) -> None:
    steps = sum(1 for _ in READERS[reader](PAGES[page]))
    # each step takes a piece, or some labels of it; what is read again is counted again
    assert len(PAGES[page]) // PIECE_BYTES <= steps <= 10 * len(PAGES[page]) // STEP_BYTES


@pytest.mark.parametrize("reader", READERS)
def test_a_page_with_a_line_that_is_too_long_is_refused(reader: str) -> None:
    with pytest.raises(UnreadablePageError, match=f"a line of more than {MAX_LINE_BYTES} bytes"):
        at_once(READERS[reader](LOAD + b"# " + b"x" * SIZE))


@pytest.mark.parametrize(
    ("reader", "series"),
    [
        ("load", b"vllm:num_requests_waiting 1\n"),
        ("report", b"vllm:prompt_tokens_total 1\n"),
        ("latencies", b'vllm:time_to_first_token_seconds_bucket{le="1"} 1\n'),
    ],
)
def test_a_page_with_too_many_series_is_refused(reader: str, series: bytes) -> None:
    with pytest.raises(UnreadablePageError, match=f"more than {MOST_SERIES} series"):
        at_once(READERS[reader](LOAD + series * (2 * MOST_SERIES)))


def test_what_many_series_add_up_to_fits_into_records() -> None:
    load = at_once(parse_load(LOAD + b"vllm:num_requests_waiting 1e15\n" * 10_000, reported_at=0.0))
    assert load is not None
    assert load.waiting_requests == 10**15


def test_a_number_of_any_length_in_a_label_is_no_capacity() -> None:
    page = LOAD + b'vllm:cache_config_info{block_size="' + b"9" * 5000 + b'",num_gpu_blocks="1"} 1\n'
    load = at_once(parse_load(page, reported_at=0.0))
    assert load is not None
    assert load.kv_capacity_tokens is None


def test_a_pod_has_few_models() -> None:
    page = b"".join(
        b'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="%d"} 1\n'
        b'vllm:time_to_first_token_seconds_sum{model_name="%d"} 1\n' % (number, number)
        for number in range(100)
    )
    first_token, _ = at_once(parse_latencies(page))
    assert list(first_token) == [str(number) for number in range(MOST_MODELS)]


# --- turns ------------------------------------------------------------------------------------------------------------


class Cpu:
    """CPU time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float, *, steps: int, log: list[str], name: str) -> Steps[str]:
        for _ in range(steps):
            self.now += seconds
            log.append(name)
            yield
        return name


async def test_a_page_that_takes_little_is_read_in_one_turn() -> None:
    cpu, log = Cpu(), list[str]()
    reading = asyncio.ensure_future(PageTurns(cpu_seconds=cpu).read(cpu.work(1e-5, steps=50, log=log, name="a")))
    await asyncio.sleep(0)
    assert reading.done()
    assert await reading == "a"


async def test_pages_that_take_long_take_turns_and_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, log, rests = Cpu(), list[str](), list[float]()
    sleep = asyncio.sleep

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", rest)
    turns, step = PageTurns(cpu_seconds=cpu), 2 * FREE_SECONDS
    names = ("a", "b")
    read = await asyncio.gather(*(turns.read(cpu.work(step, steps=5, log=log, name=name)) for name in names))
    assert read == ["a", "b"]
    assert "".join(log) == "aaa" + "bb" + "baba" + "b"  # two steps of each are free
    assert rests == pytest.approx([step / SHARE] * 6)


async def test_a_page_that_is_given_up_leaves_its_turn_to_the_others() -> None:
    cpu, log = Cpu(), list[str]()
    turns = PageTurns(cpu_seconds=cpu)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await turns.read(cpu.work(1.0, steps=1000, log=log, name="a"))
    async with asyncio.timeout(10):
        assert await turns.read(cpu.work(FREE_SECONDS, steps=2, log=log, name="b")) == "b"

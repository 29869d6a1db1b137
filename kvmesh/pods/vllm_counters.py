"""The few lines of a vLLM pod's /metrics that tell whether its events can be believed. Called once a scrape; no I/O.

Names of vLLM 0.8.5 to 0.32 (vllm/v1/metrics/loggers.py). The page has a thousand lines; only these are looked for.
"""

import re
from collections.abc import Iterator

from kvmesh.pods.pod_report import EngineCounters, PodReport

_PROMPTS = b"vllm:prompt_tokens_total"
_CACHED = b"vllm:prompt_tokens_cached_total"
_GENERATED = b"vllm:generation_tokens_total"
_PREFILLS = b"vllm:time_to_first_token_seconds_count"
_RUNNING, _WAITING = b"vllm:num_requests_running", b"vllm:num_requests_waiting"
_QUERIES, _HITS = b"vllm:prefix_cache_queries_total", b"vllm:prefix_cache_hits_total"
_OLD_QUERIES, _OLD_HITS = b"vllm:gpu_prefix_cache_queries_total", b"vllm:gpu_prefix_cache_hits_total"  # until 0.9
_OLD_UNIT = re.compile(rb"^# HELP vllm:gpu_prefix_cache_hits\S* [^\n]*\bblocks\b", re.MULTILINE)  # 0.8; tokens since
_STARTED = b"process_start_time_seconds"
_CONFIG = b"vllm:cache_config_info"

_ENGINE = re.compile(rb'[{,]engine="(\d{1,6})"')
_LABEL = re.compile(rb'[{,](\w+)="([^"\\]*)"')
_SIZES = (b"block_size", b"effective_attention_block_size")  # a block is cached once it is that full
_FINER_SIZES = (b"hash_block_size", b"prefix_match_unit", b"cache_hit_alignment_tokens")
_LARGEST = 1e15  # what no pod counts, and what sums of which are exact
_MAX_ENGINES = 1024


def parse_pod_report(text: bytes, *, scraped_at: float) -> PodReport:
    """Read the Prometheus text. What is missing or unreadable is None or 0; never raises."""
    text = b"\n" + text  # so that the first line is found like any other
    started = [value for _, value in _series(text, _STARTED)]
    config = [dict(_LABEL.findall(labels)) for labels, _ in _series(text, _CONFIG)]
    sizes = _numbers(config, _SIZES)
    block_size = max(sizes, default=None)
    caching = {labels.get(b"enable_prefix_caching") for labels in config}
    return PodReport(
        scraped_at=scraped_at,
        started_at=started[0] if len(started) == 1 and started[0] > 0 else None,
        block_size=block_size,
        other_block_sizes=frozenset(sizes | _numbers(config, _FINER_SIZES)) - {block_size or 0},
        caches_prefixes=b"True" in caching if caching & {b"True", b"False"} else None,
        engines=_engines(text, block_size=block_size),
    )


def _engines(text: bytes, *, block_size: int | None) -> dict[int, EngineCounters] | None:
    """Return the counters by engine, or None where the decisive ones are missing."""
    prompts, prefills = _by_engine(text, _PROMPTS), _by_engine(text, _PREFILLS)
    if not prompts or prompts.keys() != prefills.keys() or len(prompts) > _MAX_ENGINES:
        return None
    cached, generated = _by_engine(text, _CACHED), _by_engine(text, _GENERATED)
    running, waiting = _by_engine(text, _RUNNING), _by_engine(text, _WAITING)
    queries, hits = _by_engine(text, _QUERIES), _by_engine(text, _HITS)
    if not queries:
        queries, hits = _by_engine(text, _OLD_QUERIES), _by_engine(text, _OLD_HITS)
        if _OLD_UNIT.search(text):
            queries, hits = ({engine: n * (block_size or 1) for engine, n in of.items()} for of in (queries, hits))
    return {
        engine: EngineCounters(
            prompt_tokens=prompts[engine],
            cached_prompt_tokens=cached.get(engine),
            generated_tokens=generated.get(engine, 0),
            prefills=prefills[engine],
            unfinished=running.get(engine, 0) + waiting.get(engine, 0),
            queried_tokens=queries.get(engine, 0),
            hit_tokens=hits.get(engine, 0),
        )
        for engine in prompts
    }


def _by_engine(text: bytes, name: bytes) -> dict[int, int]:
    """Sum the series of one name by engine; versions that name no engine have one."""
    sums: dict[int, int] = {}
    for labels, value in _series(text, name):
        found = _ENGINE.search(labels)
        engine = int(found[1]) if found else 0
        sums[engine] = sums.get(engine, 0) + int(value)
    return sums


def _series(text: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Yield labels and value of every readable series of exactly this name."""
    start_of_line = b"\n" + name
    position = text.find(start_of_line)
    while position >= 0:
        rest = position + len(start_of_line)
        end = text.find(b"\n", rest)
        series = text[rest : end if end >= 0 else len(text)]
        if series[:1] in (b"{", b" "):  # not a longer name that starts alike
            labels, _, value = series.rpartition(b"}") if series[:1] == b"{" else (b"", b"", series)
            number = _number(value.split())
            if number is not None:
                yield labels, number
        position = text.find(start_of_line, rest)


def _number(fields: list[bytes]) -> float | None:
    # the first field is the value, an optional second one its timestamp
    try:
        number = float(fields[0])
    except (ValueError, IndexError):
        return None
    return number if 0 <= number <= _LARGEST else None  # NaN is neither


def _numbers(config: list[dict[bytes, bytes]], names: tuple[bytes, ...]) -> set[int]:
    texts = [labels.get(name, b"") for labels in config for name in names]
    return {int(text) for text in texts if text.isdigit() and 0 < len(text) < 8 and int(text)}

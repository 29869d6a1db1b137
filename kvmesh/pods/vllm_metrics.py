"""Reads a vLLM pod's /metrics: the few of its thousand lines that routing, findings and latencies need. No I/O.

Names of vLLM 0.8 to 0.32 (vllm/v1/metrics/loggers.py); most have a series for each engine (data-parallel rank) of the
pod. What is missing or unreadable is None, 0 or empty. Each function finds its lines with one regular expression in one
pass, which takes half of the time of a search for each name: some 50 us for a load.

A pod may answer anything. So a page is read in steps of some hundred microseconds (`page_steps`), in time and memory
that grow with its length alone, and one beyond the limits raises UnreadablePageError.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf, isnan

from kvmesh.pods.page_steps import Steps, UnreadablePageError
from kvmesh.pods.pod_report import EndpointLoad, EngineCounters, PodHistogram, PodReport

Series = tuple[bytes, float]  # labels as they are written, and the value

WAITING, RUNNING = b"vllm:num_requests_waiting", b"vllm:num_requests_running"
HITS, QUERIES = b"vllm:prefix_cache_hits_total", b"vllm:prefix_cache_queries_total"
HITS_BEFORE_0_10, QUERIES_BEFORE_0_10 = b"vllm:gpu_prefix_cache_hits_total", b"vllm:gpu_prefix_cache_queries_total"
IN_BLOCKS = re.compile(rb"\n# HELP vllm:gpu_prefix_cache_hits\S*+ [^\n]*\bblocks\b")  # 0.8; tokens since
KV_USAGE = b"vllm:kv_cache_usage_perc"  # a share of 1 in spite of its name
KV_USAGE_BEFORE_0_10 = b"vllm:gpu_cache_usage_perc"
PROMPT_TOKENS, CACHED_TOKENS = b"vllm:prompt_tokens_total", b"vllm:prompt_tokens_cached_total"
GENERATED_TOKENS = b"vllm:generation_tokens_total"
PREEMPTIONS = b"vllm:num_preemptions_total"
# with --enable-mfu-metrics only
READ_BYTES, WRITTEN_BYTES = b"vllm:estimated_read_bytes_per_gpu_total", b"vllm:estimated_write_bytes_per_gpu_total"
ADAPTERS = b"vllm:lora_requests_info"
CONFIG = b"vllm:cache_config_info"
SIZES = (b"block_size", b"effective_attention_block_size")  # a block is cached once it is that full
CAPACITY = (b"block_size", b"num_gpu_blocks")
CACHING = b"enable_prefix_caching"
MAX_LORA, RUN_NOW, WAIT_NOW = b"max_lora", b"running_lora_adapters", b"waiting_lora_adapters"
LE, MODEL = b"le", b"model_name"
FINER_SIZES = (b"hash_block_size", b"prefix_match_unit", b"cache_hit_alignment_tokens")

PREFILL_SECONDS = b"vllm:request_prefill_time_seconds"
PREFILL_COMPUTED = b"vllm:request_prefill_kv_computed_tokens"  # not in older versions
FIRST_TOKEN = b"vllm:time_to_first_token_seconds"
INTER_TOKEN = b"vllm:inter_token_latency_seconds"
INTER_TOKEN_BEFORE_0_10 = b"vllm:time_per_output_token_seconds"
BUCKET, SUM, COUNT = b"_bucket", b"_sum", b"_count"

VLLM = b"vllm:"
# \b and possessive repeats: no byte is looked at twice, whatever does not match
LABEL = re.compile(rb'\b(\w++)="((?:[^"\\]++|\\.)*+)"', re.DOTALL)
ENGINE = re.compile(rb'\bengine="(\d{1,6})"')
ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
MOST_MODEL_CHARACTERS = 200  # of a name that becomes a label
MOST_BUCKETS = 100  # of one histogram
MOST_MODELS = 8  # of one pod; vLLM names one
MOST_ENGINES = 1024
MOST_SERIES = 1 << 14  # of those that one function reads: a hundred for each engine, of as many as a page has room for
MAX_LINE_BYTES = PIECE_BYTES = 1 << 16  # of whole lines, searched in one step: the usual page is one or two
STEP_BYTES = 1 << 15  # of labels read in one step
LABELS_BYTES = 256  # what reading a line's labels takes beside their length, in bytes of a step
LONGEST_NUMBER = 15  # digits, of a label
LARGEST_COUNT = 10**15  # what no pod reaches, and what sums of which are exact


def _lines(*names: bytes) -> re.Pattern[bytes]:
    """Return what finds name, labels and value of all lines of exactly these names; a timestamp may follow."""
    rests = b"|".join(name.removeprefix(VLLM) for name in names)
    return re.compile(rb"\n(" + VLLM + b"(?:" + rests + rb"))(?:\{([^\n]*)\})?[ \t]++(\S++)")


_STARTED = re.compile(rb"\n(process_start_time_seconds)(?:\{([^\n]*)\})?[ \t]++(\S++)")
_LOAD = _lines(
    *(WAITING, RUNNING, KV_USAGE, KV_USAGE_BEFORE_0_10, HITS, QUERIES, PREEMPTIONS, CONFIG, ADAPTERS),
    *(READ_BYTES, WRITTEN_BYTES, PREFILL_COMPUTED + SUM, PREFILL_SECONDS + SUM, PREFILL_SECONDS + COUNT),
    *(each + end for each in (FIRST_TOKEN, INTER_TOKEN, INTER_TOKEN_BEFORE_0_10) for end in (SUM, COUNT)),
)
_REPORT = _lines(
    *(WAITING, RUNNING, HITS, QUERIES, HITS_BEFORE_0_10, QUERIES_BEFORE_0_10, CONFIG),
    *(PROMPT_TOKENS, CACHED_TOKENS, GENERATED_TOKENS, FIRST_TOKEN + COUNT),
)
_LATENCIES = _lines(
    *(each + end for each in (FIRST_TOKEN, INTER_TOKEN, INTER_TOKEN_BEFORE_0_10) for end in (BUCKET, SUM))
)


def parse_load(text: bytes, *, reported_at: float) -> Steps[EndpointLoad | None]:
    """Read the load, or return None where the queue or the KV use is missing; `reported_at` in monotonic seconds.

    Counts are summed over the pod's engines, the KV use is their mean. Raise UnreadablePageError.
    """
    found = yield from _read(_LOAD, text)
    usage = found.get(KV_USAGE) or found.get(KV_USAGE_BEFORE_0_10)
    if not usage or WAITING not in found or RUNNING not in found:
        return None
    inter_token = INTER_TOKEN if INTER_TOKEN + COUNT in found else INTER_TOKEN_BEFORE_0_10
    moves = READ_BYTES in found or WRITTEN_BYTES in found
    running_adapters, waiting_adapters, max_adapters = _adapters(found.get(ADAPTERS, ()))
    config = yield from _label_sets(found.get(CONFIG, ()), CAPACITY)

    def total(name: bytes) -> float:
        return sum((value for _, value in found.get(name, ())), 0.0)

    def count(name: bytes) -> int:
        return min(sum(int(value) for _, value in found.get(name, ())), LARGEST_COUNT)

    return EndpointLoad(
        waiting_requests=count(WAITING),
        running_requests=count(RUNNING),
        kv_usage=min(sum(value for _, value in usage) / len(usage), 1.0),
        prefix_hit_tokens=count(HITS),
        prefix_query_tokens=count(QUERIES),
        reported_at=reported_at,
        kv_capacity_tokens=_capacity(config),
        preemptions=count(PREEMPTIONS),
        running_adapters=running_adapters,
        waiting_adapters=waiting_adapters,
        max_adapters=max_adapters,
        inter_token_seconds_sum=total(inter_token + SUM),
        inter_token_count=count(inter_token + COUNT),
        memory_bytes_moved=total(READ_BYTES) + total(WRITTEN_BYTES) if moves else None,
        prefill_seconds_sum=total(PREFILL_SECONDS + SUM),
        prefill_count=count(PREFILL_SECONDS + COUNT),
        prefill_computed_tokens=count(PREFILL_COMPUTED + SUM),
        first_token_seconds_sum=total(FIRST_TOKEN + SUM),
        first_token_count=count(FIRST_TOKEN + COUNT),
    )


def parse_pod_report(text: bytes, *, scraped_at: float) -> Steps[PodReport]:
    """Read what the pod's events can be checked against; `scraped_at` in monotonic seconds.

    Raise UnreadablePageError.
    """
    found = yield from _read(_REPORT, text)
    config = yield from _label_sets(found.get(CONFIG, ()), (*SIZES, *FINER_SIZES, CACHING))
    sizes = _numbers(config, SIZES)
    block_size = max(sizes, default=None)
    caching = {labels.get(CACHING) for labels in config}
    in_blocks = False
    if QUERIES not in found and QUERIES_BEFORE_0_10 in found:
        in_blocks = yield from _counts_blocks(text)
    return PodReport(
        scraped_at=scraped_at,
        started_at=(yield from parse_started_at(text)),
        block_size=block_size,
        other_block_sizes=frozenset(sizes | _numbers(config, FINER_SIZES)) - {block_size or 0},
        caches_prefixes=b"True" in caching if caching & {b"True", b"False"} else None,
        engines=(yield from _engines(found, tokens_each=block_size or 1 if in_blocks else 1)),
    )


def parse_started_at(text: bytes) -> Steps[float | None]:
    """Return when the API server's process started, in its unix seconds; None if it does not say, or several do.

    Raise UnreadablePageError.
    """
    found = yield from _read(_STARTED, text)
    started = [value for series in found.values() for _, value in series]
    return started[0] if len(started) == 1 and started[0] > 0 else None


def parse_latencies(text: bytes) -> Steps[tuple[Mapping[str, PodHistogram], Mapping[str, PodHistogram]]]:
    """Return the histograms of the time to the first token and of that between tokens, by the pod's `model_name`.

    Summed over the pod's engines; a histogram that is not whole is left out. Costs about 0.1 ms a page. Raise
    UnreadablePageError.
    """
    found = yield from _read(_LATENCIES, text)
    inter_token = INTER_TOKEN if INTER_TOKEN + BUCKET in found else INTER_TOKEN_BEFORE_0_10
    first = yield from _histograms(found.get(FIRST_TOKEN + BUCKET, ()), found.get(FIRST_TOKEN + SUM, ()))
    between = yield from _histograms(found.get(inter_token + BUCKET, ()), found.get(inter_token + SUM, ()))
    return first, between


def _read(lines: re.Pattern[bytes], text: bytes) -> Steps[dict[bytes, list[Series]]]:
    """Return the series by name; those whose value is no count are left out."""
    found: dict[bytes, list[Series]] = {}
    series = 0
    for begin, end in _pieces(text):
        if begin:
            yield
        # the first line is found like any other
        for name, labels, number in lines.findall(b"\n" + text[begin:end]):
            series += 1
            try:
                value = float(number)
            except ValueError:
                continue
            if 0 <= value <= LARGEST_COUNT:  # NaN is neither
                found.setdefault(name, []).append((labels, value))
        if series > MOST_SERIES:
            raise UnreadablePageError(f"/metrics has more than {MOST_SERIES} series of the names that are read")
    return found


def _pieces(text: bytes) -> Iterator[tuple[int, int]]:
    """Return where pieces of whole lines begin and end."""
    begin, size = 0, len(text)
    while size - begin > PIECE_BYTES:
        end = text.rfind(b"\n", begin, begin + PIECE_BYTES)
        if end < 0:
            raise UnreadablePageError(f"/metrics has a line of more than {MAX_LINE_BYTES} bytes")
        yield begin, end
        begin = end + 1
    yield begin, size


def _counts_blocks(text: bytes) -> Steps[bool]:
    for begin, end in _pieces(text):
        if IN_BLOCKS.search(b"\n" + text[begin:end]):
            return True
        yield
    return False


def _label_sets(series: Iterable[Series], wanted: Collection[bytes]) -> Steps[list[dict[bytes, bytes]]]:
    """Return the wanted labels of each series."""
    sets = []
    read = 0
    for written, _ in series:
        sets.append(_labels(written, wanted))
        read += LABELS_BYTES + len(written)
        if read > STEP_BYTES:
            read = 0
            yield
    return sets


def _labels(written: bytes, wanted: Collection[bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in LABEL.findall(written) if name in wanted}


def _capacity(config: Iterable[dict[bytes, bytes]]) -> int | None:
    """Return the tokens that the pod's KV cache takes, over all engines: blocks x block size."""
    tokens = 0
    for labels in config:
        size, blocks = (labels.get(name, b"") for name in CAPACITY)
        if not size.isdigit() or not blocks.isdigit() or max(len(size), len(blocks)) > LONGEST_NUMBER:
            return None
        tokens += int(size) * int(blocks)
    return tokens if 0 < tokens <= LARGEST_COUNT else None


def _numbers(config: list[dict[bytes, bytes]], names: tuple[bytes, ...]) -> set[int]:
    texts = [labels.get(name, b"") for labels in config for name in names]
    return {int(text) for text in texts if text.isdigit() and 0 < len(text) < 8 and int(text)}


def _adapters(series: Iterable[Series]) -> tuple[frozenset[str], frozenset[str], int | None]:
    """Return the LoRA adapters that run and wait, and how many may be loaded.

    The gauge has a series for each combination that there has been; its value is the time, so the greatest is now.
    """
    labels = _labels(max(series, key=lambda each: each[1], default=(b"", 0.0))[0], (MAX_LORA, RUN_NOW, WAIT_NOW))
    most = labels.get(MAX_LORA, b"")
    return (
        _names(labels.get(RUN_NOW, b"")),
        _names(labels.get(WAIT_NOW, b"")),
        int(most) if most.isdigit() and len(most) < 6 else None,
    )


def _names(text: bytes) -> frozenset[str]:
    return frozenset(name.strip() for name in text.decode("utf-8", "replace").split(",") if name.strip())


def _engines(found: Mapping[bytes, list[Series]], *, tokens_each: int) -> Steps[dict[int, EngineCounters] | None]:
    """Return the counters by engine, or None where the decisive ones are missing; `tokens_each`: of a query or hit."""

    def of(name: bytes) -> Steps[dict[int, int]]:
        """Sum the series by engine; versions that name no engine have one."""
        sums: dict[int, int] = {}
        read = 0
        for labels, value in found.get(name, ()):
            engine = ENGINE.search(labels)
            number = int(engine[1]) if engine else 0
            sums[number] = min(sums.get(number, 0) + int(value), LARGEST_COUNT)
            read += LABELS_BYTES + len(labels)
            if read > STEP_BYTES:
                read = 0
                yield
        return sums

    prompts, prefills = (yield from of(PROMPT_TOKENS)), (yield from of(FIRST_TOKEN + COUNT))
    if not prompts or prompts.keys() != prefills.keys() or len(prompts) > MOST_ENGINES:
        return None
    cached, generated = (yield from of(CACHED_TOKENS)), (yield from of(GENERATED_TOKENS))
    running, waiting = (yield from of(RUNNING)), (yield from of(WAITING))
    queries, hits = (yield from of(QUERIES)), (yield from of(HITS))
    if not queries:
        queries, hits = (yield from of(QUERIES_BEFORE_0_10)), (yield from of(HITS_BEFORE_0_10))
    return {
        engine: EngineCounters(
            prompt_tokens=prompts[engine],
            cached_prompt_tokens=cached.get(engine),
            generated_tokens=generated.get(engine, 0),
            prefills=prefills[engine],
            unfinished=running.get(engine, 0) + waiting.get(engine, 0),
            queried_tokens=queries.get(engine, 0) * tokens_each,
            hit_tokens=hits.get(engine, 0) * tokens_each,
        )
        for engine in prompts
    }


def _histograms(buckets: Collection[Series], sums: Collection[Series]) -> Steps[Mapping[str, PodHistogram]]:
    counts: dict[bytes, dict[float, float]] = {}  # model -> bound -> observations up to it
    read = 0
    for written, count in buckets:
        labels = _labels(written, (LE, MODEL))
        bound, model = _bound(labels.get(LE, b"")), labels.get(MODEL, b"")
        of_model = counts.setdefault(model, {}) if model in counts or len(counts) < MOST_MODELS else {}
        if bound is not None and len(of_model) < MOST_BUCKETS:
            of_model[bound] = of_model.get(bound, 0.0) + count
        read += LABELS_BYTES + len(written)
        if read > STEP_BYTES:
            read = 0
            yield
    seconds: dict[bytes, float] = {}
    of_sums = yield from _label_sets(sums, (MODEL,))
    for labels, (_, some) in zip(of_sums, sums, strict=True):
        model = labels.get(MODEL, b"")
        seconds[model] = seconds.get(model, 0.0) + some
    found: dict[str, PodHistogram] = {}
    for model, of_model in counts.items():
        bounds = tuple(sorted(of_model))
        cumulative = tuple(of_model[bound] for bound in bounds)
        if model in seconds and bounds[-1:] == (inf,) and cumulative == tuple(sorted(cumulative)):
            found[_plain(model)] = PodHistogram(bounds=bounds, counts=cumulative, seconds=seconds[model])
    return found


def _bound(text: bytes) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if isnan(bound) or bound < 0 else bound


def _plain(escaped: bytes) -> str:
    """Return a label's value as it is meant."""
    plain = ESCAPED.sub(lambda found: b"\n" if found[1] == b"n" else found[1], escaped)
    return plain.decode("utf-8", "replace")[:MOST_MODEL_CHARACTERS]

"""The few lines of a vLLM pod's /metrics that routing needs, found without parsing the other thousand."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isnan

from extproc.pods.endpoint import EndpointLoad

# Names of vLLM 0.8 to 0.32; one series per engine (data-parallel rank) of the pod. Names that begin alike are found in
# one pass over the page: passes are what reading it costs
REQUESTS, WAITING, RUNNING = b"vllm:num_requests_", b"waiting", b"running"
PREFIX_CACHE, HITS, QUERIES = b"vllm:prefix_cache_", b"hits_total", b"queries_total"
KV_USAGE = b"vllm:kv_cache_usage_perc"  # a share of 1 in spite of its name
KV_USAGE_BEFORE_0_10 = b"vllm:gpu_cache_usage_perc"

PREEMPTIONS = b"vllm:num_preemptions"
SUM, COUNT, TOTAL = b"_sum", b"_count", b"_total"
PREFILL_SECONDS = b"vllm:request_prefill_time_seconds"
PREFILL_COMPUTED = b"vllm:request_prefill_kv_computed_tokens"  # not in older versions
FIRST_TOKEN = b"vllm:time_to_first_token_seconds"
INTER_TOKEN = b"vllm:inter_token_latency_seconds"
INTER_TOKEN_BEFORE_0_10 = b"vllm:time_per_output_token_seconds"
HISTOGRAMS = (PREFILL_SECONDS, PREFILL_COMPUTED, FIRST_TOKEN, INTER_TOKEN, INTER_TOKEN_BEFORE_0_10)
# with --enable-mfu-metrics only
READ_BYTES, WRITTEN_BYTES = b"vllm:estimated_read_bytes_per_gpu", b"vllm:estimated_write_bytes_per_gpu"
CACHE_CONFIG = b"\nvllm:cache_config_info{"
ADAPTERS = b"\nvllm:lora_requests_info{"
# begins at a word's start only: what is no label costs one look, however long it is
LABEL = re.compile(rb'\b(\w+)="((?:[^"\\]|\\.)*)"')

ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
MOST_MODEL_CHARACTERS = 200  # of a name that becomes a label
MOST_BUCKETS = 100  # of one histogram
LARGEST_COUNT = 1e15  # what no pod reaches, and what sums of which are exact


@dataclass(frozen=True, slots=True, kw_only=True)
class PodHistogram:
    """One histogram as a pod shows it: counts of all observations up to each bound, since its start."""

    bounds: tuple[float, ...]  # seconds, ascending; the last one is inf
    counts: tuple[float, ...]  # as many, cumulative
    seconds: float  # sum of all observations


def parse_load(text: bytes, *, reported_at: float) -> EndpointLoad | None:
    """Read the load from Prometheus text, or return None where the queue or the KV use is missing.

    Counts are summed over the pod's engines, the KV use is their mean.
    """
    text = b"\n" + text  # so that the first line is found like any other
    waiting, running = _values(text, REQUESTS, WAITING, RUNNING)
    (usage,) = _values(text, KV_USAGE, b"")
    if not usage:
        (usage,) = _values(text, KV_USAGE_BEFORE_0_10, b"")
    if not waiting or not running or not usage:
        return None
    hits, queries = _values(text, PREFIX_CACHE, HITS, QUERIES)
    sums, counts = _histograms(text, SUM), _histograms(text, COUNT)
    inter_token = INTER_TOKEN if INTER_TOKEN in counts else INTER_TOKEN_BEFORE_0_10
    (preemptions,) = _values(text, PREEMPTIONS, TOTAL)
    (read,), (written,) = _values(text, READ_BYTES, TOTAL), _values(text, WRITTEN_BYTES, TOTAL)
    running_adapters, waiting_adapters, max_adapters = _adapters(text)
    return EndpointLoad(
        waiting_requests=sum(map(int, waiting)),
        running_requests=sum(map(int, running)),
        kv_usage=min(sum(usage) / len(usage), 1.0),
        prefix_hit_tokens=sum(map(int, hits)),
        prefix_query_tokens=sum(map(int, queries)),
        reported_at=reported_at,
        kv_capacity_tokens=_capacity(text),
        preemptions=sum(map(int, preemptions)),
        running_adapters=running_adapters,
        waiting_adapters=waiting_adapters,
        max_adapters=max_adapters,
        inter_token_seconds_sum=sums.get(inter_token, 0.0),
        inter_token_count=int(counts.get(inter_token, 0.0)),
        memory_bytes_moved=sum(read) + sum(written) if read or written else None,
        prefill_seconds_sum=sums.get(PREFILL_SECONDS, 0.0),
        prefill_count=int(counts.get(PREFILL_SECONDS, 0.0)),
        prefill_computed_tokens=int(sums.get(PREFILL_COMPUTED, 0.0)),
        first_token_seconds_sum=sums.get(FIRST_TOKEN, 0.0),
        first_token_count=int(counts.get(FIRST_TOKEN, 0.0)),
    )


def parse_latencies(text: bytes) -> tuple[Mapping[str, PodHistogram], Mapping[str, PodHistogram]]:
    """Return the histograms of the time to the first token and of that between tokens, by the pod's `model_name`.

    Summed over the pod's engines; a histogram that is not whole is left out. Costs about 0.1 ms a page, which is why
    `parse_load` does without them.
    """
    text = b"\n" + text
    inter_token = INTER_TOKEN if text.find(b"\n" + INTER_TOKEN + b"_bucket{") >= 0 else INTER_TOKEN_BEFORE_0_10
    return _pod_histograms(text, FIRST_TOKEN), _pod_histograms(text, inter_token)


def _pod_histograms(text: bytes, name: bytes) -> Mapping[str, PodHistogram]:
    buckets: dict[bytes, dict[float, float]] = {}
    for line, count in _series(text, b"\n" + name + b"_bucket{"):
        labels = _labels(line)
        bound = _bound(labels.get(b"le", b""))
        of_model = buckets.setdefault(labels.get(b"model_name", b""), {})
        if bound is not None and len(of_model) < MOST_BUCKETS:
            of_model[bound] = of_model.get(bound, 0.0) + count
    sums: dict[bytes, float] = {}
    for line, seconds in _series(text, b"\n" + name + b"_sum{"):
        model = _labels(line).get(b"model_name", b"")
        sums[model] = sums.get(model, 0.0) + seconds
    found: dict[str, PodHistogram] = {}
    for model, counts in buckets.items():
        bounds = tuple(sorted(counts))
        cumulative = tuple(counts[bound] for bound in bounds)
        if model in sums and bounds[-1:] == (inf,) and cumulative == tuple(sorted(cumulative)):
            found[_plain(model)] = PodHistogram(bounds=bounds, counts=cumulative, seconds=sums[model])
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


def _histograms(text: bytes, ending: bytes) -> dict[bytes, float]:
    """Return the sums or the counts (by `ending`) of HISTOGRAMS that are there, over all their series.

    Found by their ends: a histogram has twenty lines for its buckets that begin as its sum does.
    """
    totals: dict[bytes, float] = {}
    position = text.find(ending)
    while position >= 0:
        rest = position + len(ending)
        if text[rest : rest + 1] in (b"{", b" "):
            name = text[text.rfind(b"\n", 0, position) + 1 : position]
            if name in HISTOGRAMS:
                end = text.find(b"\n", rest)
                number = _count(text[rest : end if end >= 0 else len(text)].rpartition(b"}")[2].split())
                if number is not None:
                    totals[name] = totals.get(name, 0.0) + number
        position = text.find(ending, rest)
    return totals


def _capacity(text: bytes) -> int | None:
    """Return the tokens that the pod's KV cache takes, over all engines: blocks x block size."""
    tokens = 0
    for line, _ in _series(text, CACHE_CONFIG):
        labels = _labels(line)
        size, blocks = labels.get(b"block_size", b""), labels.get(b"num_gpu_blocks", b"")
        if not size.isdigit() or not blocks.isdigit():
            return None
        tokens += int(size) * int(blocks)
    return tokens if 0 < tokens <= LARGEST_COUNT else None


def _adapters(text: bytes) -> tuple[frozenset[str], frozenset[str], int | None]:
    """Return the LoRA adapters that run and wait, and how many may be loaded.

    The gauge has a series for each combination that there has been; its value is the time, so the greatest is now.
    """
    series = _series(text, ADAPTERS)
    if not series:
        return frozenset(), frozenset(), None
    found = _labels(max(series, key=lambda line_and_value: line_and_value[1])[0])
    most = found.get(b"max_lora", b"")
    return (
        _names(found.get(b"running_lora_adapters", b"")),
        _names(found.get(b"waiting_lora_adapters", b"")),
        int(most) if most.isdigit() and len(most) < 6 else None,
    )


def _names(text: bytes) -> frozenset[str]:
    return frozenset(name.strip() for name in text.decode("utf-8", "replace").split(",") if name.strip())


def _labels(line: bytes) -> dict[bytes, bytes]:
    return dict(LABEL.findall(line))


def _series(text: bytes, start: bytes) -> list[tuple[bytes, float]]:
    """Return the labels, not read yet, and the value of each series that begins so."""
    series = []
    position = text.find(start)
    while position >= 0:
        rest = position + len(start)
        end = text.find(b"\n", rest)
        line = text[rest : end if end >= 0 else len(text)]
        number = _count(line.rpartition(b"}")[2].split())
        if number is not None:
            series.append((line, number))
        position = text.find(start, rest)
    return series


def _values(text: bytes, stem: bytes, *endings: bytes) -> tuple[list[float], ...]:
    """Return for each ending the values of all series named exactly `stem + ending`; unreadable ones are left out."""
    values: tuple[list[float], ...] = tuple([] for _ in endings)
    start_of_line = b"\n" + stem
    position = text.find(start_of_line)
    while position >= 0:
        rest = position + len(start_of_line)
        end = text.find(b"\n", rest)
        series = text[rest : end if end >= 0 else len(text)]
        for ending, of_ending in zip(endings, values, strict=True):
            # not a longer name that starts alike
            if series.startswith(ending) and series[len(ending) : len(ending) + 1] in (b"{", b" "):
                number = _count(series[len(ending) :].rpartition(b"}")[2].split())
                if number is not None:
                    of_ending.append(number)
        position = text.find(start_of_line, rest)
    return values


def _count(fields: list[bytes]) -> float | None:
    # the first field is the value, an optional second one its timestamp
    try:
        number = float(fields[0])
    except (ValueError, IndexError):
        return None
    return number if 0 <= number <= LARGEST_COUNT else None  # NaN is neither

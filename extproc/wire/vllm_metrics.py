"""The few lines of a vLLM pod's /metrics that routing needs, found without parsing the other thousand."""

from extproc.core.endpoint import EndpointLoad

# Names of vLLM 0.8 to 0.32; one series per engine (data-parallel rank) of the pod. Names that begin alike are found in
# one pass over the page: passes are what reading it costs
REQUESTS, WAITING, RUNNING = b"vllm:num_requests_", b"waiting", b"running"
PREFIX_CACHE, HITS, QUERIES = b"vllm:prefix_cache_", b"hits_total", b"queries_total"
KV_USAGE = b"vllm:kv_cache_usage_perc"  # a share of 1 in spite of its name
KV_USAGE_BEFORE_0_10 = b"vllm:gpu_cache_usage_perc"

LARGEST_COUNT = 1e15  # what no pod reaches, and what sums of which are exact


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
    return EndpointLoad(
        waiting_requests=sum(map(int, waiting)),
        running_requests=sum(map(int, running)),
        kv_usage=min(sum(usage) / len(usage), 1.0),
        prefix_hit_tokens=sum(map(int, hits)),
        prefix_query_tokens=sum(map(int, queries)),
        reported_at=reported_at,
    )


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

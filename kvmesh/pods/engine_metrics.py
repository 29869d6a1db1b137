"""Reads a pod's page of metrics: the few of its thousand lines that routing, findings and latencies need. No I/O.

`engine_profiles` has the names. Most have a series for each data-parallel rank of the pod. Missing and unreadable
values are None, 0 or empty. Each function finds its lines with one regular expression in one pass, which takes half of
the time of a search for each name: about 50 us for a load.

A pod may answer anything. So a page is read in steps of a few hundred microseconds (`page_steps`), in time and memory
that grow with its length alone; a page beyond the limits raises UnreadablePageError.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kvmesh.pods.engine_profiles import PROFILES, Adapters, Choices, EngineProfile, Sum
from kvmesh.pods.metrics_page import (
    LABELS_BYTES,
    LARGEST_COUNT,
    STEP_BYTES,
    Series,
    label_sets,
    labels_of,
    lines_of,
    pieces,
    read_histograms,
    read_series,
)
from kvmesh.pods.page_steps import Steps
from kvmesh.pods.pod_report import EndpointLoad, EngineCounters, PodHistogram, PodReport

Found = Mapping[bytes, list[Series]]
MOST_ENGINES = 1024
LONGEST_NUMBER = 15  # digits of a number in a label
BUCKET, SUM, COUNT, TOTAL = b"_bucket", b"_sum", b"_count", b"_total"
_STARTED = re.compile(rb"\n(process_start_time_seconds)(?:\{([^\n]*)\})?[ \t]++(\S++)")


@dataclass(frozen=True, slots=True)
class _Reader:
    """The patterns that find a profile's lines."""

    profile: EngineProfile
    load: re.Pattern[bytes]
    report: re.Pattern[bytes]
    latencies: re.Pattern[bytes]
    rank: re.Pattern[bytes]
    replicas: re.Pattern[bytes] | None
    parts: re.Pattern[bytes] | None
    parted: frozenset[bytes]  # names that may have series for parts
    in_blocks: re.Pattern[bytes] | None


def _reader(profile: EngineProfile) -> _Reader:
    histograms = (*profile.first_token, *profile.inter_token)
    prefill = profile.prefill_seconds, profile.prefill_computed
    fetches = tuple(filter(None, (profile.fetched_bytes, profile.fetch_seconds)))
    infos = [info.name for info in (profile.cache_info, profile.adapters) if info is not None]
    load = {
        *_names_of(profile.running, profile.kv_usage, profile.queried_tokens, profile.hit_tokens, profile.preemptions),
        *_names_of(profile.capacity_tokens, profile.block_tokens, profile.blocks),
        *_names_of((profile.waiting, profile.fetching, profile.moved_bytes, profile.awake), profile.fetched_tokens),
        *(name + SUM for name in fetches),
        *(name + end for name in (*histograms, *filter(None, prefill)) for end in (SUM, COUNT)),
        *infos,
    }
    if profile.prefill_seconds and not profile.prefill_computed:
        load |= _names_of(profile.prompt_tokens, profile.cached_tokens)
    report = {
        *_names_of(profile.running, profile.queried_tokens, profile.hit_tokens, profile.prompt_tokens),
        *_names_of(profile.cached_tokens, profile.generated_tokens, profile.block_tokens, (profile.waiting,)),
        *(name + COUNT for name in profile.first_token),
        *infos[:1],
    }
    replicas, parts = b"|".join(profile.replica_labels), profile.parts_label
    in_blocks = profile.hits_in_blocks
    return _Reader(
        profile=profile,
        load=lines_of(profile.prefix, load),
        report=lines_of(profile.prefix, report),
        latencies=lines_of(profile.prefix, (name + end for name in histograms for end in (BUCKET, SUM))),
        rank=re.compile(rb"\b" + profile.rank_label + rb'="(\d{1,6})"'),
        replicas=re.compile(rb"\b(?:" + replicas + rb')="[^"]*+",?+') if replicas else None,
        parts=re.compile(rb"\b" + parts + rb'="[^"]') if parts else None,
        parted=frozenset(_names_of((profile.waiting, profile.fetching), profile.running)) if parts else frozenset(),
        in_blocks=re.compile(rb"\n# HELP " + in_blocks + rb"\S*+ [^\n]*\bblocks\b") if in_blocks else None,
    )


def _names_of(*choices: Choices) -> set[bytes]:
    return {source.name for sums in choices for each in sums for source in each}


_READERS = tuple(map(_reader, PROFILES))


def parse_load(text: bytes, *, reported_at: float) -> Steps[EndpointLoad | None]:
    """Read the load, or return None if the queue or the KV use is missing; `reported_at` in monotonic seconds.

    Counts are summed over the pod's engines, the KV use is their mean. Raise UnreadablePageError.
    """
    reader = yield from _reader_of(text)
    if reader is None:
        return None
    profile, found = reader.profile, (yield from _own(reader, (yield from read_series(reader.load, text))))
    usage = _present(found, profile.kv_usage)
    if not usage or profile.waiting[0].name not in found or not _present(found, profile.running):
        return None
    inter_token = _histogram_name(found, profile.inter_token, COUNT)
    first_token = _histogram_name(found, profile.first_token, COUNT)
    moves = any(source.name in found for source in profile.moved_bytes)
    running_adapters, waiting_adapters, max_adapters = _adapters(profile.adapters, found)
    waiting = _whole(_series(found, profile.waiting))
    fetching = min(_whole(_series(found, profile.fetching)), waiting)

    def total(name: bytes) -> float:
        return sum([value for _, value in found.get(name, ())], 0.0)

    def count(name: bytes) -> int:
        return _whole(found.get(name, ()))

    if profile.prefill_computed or not profile.prefill_seconds:
        computed = count(profile.prefill_computed + SUM)
    else:
        computed = max(_count(found, profile.prompt_tokens) - _count(found, profile.cached_tokens), 0)
    return EndpointLoad(
        waiting_requests=waiting - fetching,
        fetching_requests=fetching,
        running_requests=_count(found, profile.running),
        kv_usage=min(sum(value for _, value in usage) / len(usage), 1.0),
        prefix_hit_tokens=_count(found, profile.hit_tokens),
        prefix_query_tokens=_count(found, profile.queried_tokens),
        reported_at=reported_at,
        kv_capacity_tokens=(yield from _capacity(profile, found)),
        preemptions=_count(found, profile.preemptions),
        running_adapters=running_adapters,
        waiting_adapters=waiting_adapters,
        max_adapters=max_adapters,
        inter_token_seconds_sum=total(inter_token + SUM),
        inter_token_count=count(inter_token + COUNT),
        memory_bytes_moved=sum((value for _, value in _series(found, profile.moved_bytes)), 0.0) if moves else None,
        prefill_seconds_sum=total(profile.prefill_seconds + SUM),
        prefill_count=count(profile.prefill_seconds + COUNT),
        prefill_computed_tokens=computed,
        first_token_seconds_sum=total(first_token + SUM),
        first_token_count=count(first_token + COUNT),
        fetched_tokens=_count(found, profile.fetched_tokens),
        fetched_bytes=total(profile.fetched_bytes + SUM),
        fetch_seconds_sum=total(profile.fetch_seconds + SUM),
        caches_prefixes=not (info := profile.cache_info) or not _says_no(found.get(info.name, ()), info.caches),
        is_asleep=any(value == 0.0 for _, value in _series(found, profile.awake)),
        shows_last_step=profile.shows_last_step,
    )


def parse_pod_report(text: bytes, *, scraped_at: float) -> Steps[PodReport]:
    """Read the facts to check the pod's events against; `scraped_at` in monotonic seconds.

    Raise UnreadablePageError.
    """
    started_at = yield from parse_started_at(text)
    reader = yield from _reader_of(text)
    if reader is None:
        return PodReport(scraped_at=scraped_at, started_at=started_at)
    profile, found = reader.profile, (yield from _own(reader, (yield from read_series(reader.report, text))))
    sizes = {int(value) for _, value in _present(found, profile.block_tokens) if 0 < value < 10**7}
    finer: set[int] = set()
    caching: set[bytes | None] = set()
    if (info := profile.cache_info) is not None:
        config = yield from label_sets(found.get(info.name, ()), (*info.sizes, *info.finer_sizes, info.caches))
        sizes |= _numbers(config, info.sizes)
        finer = _numbers(config, info.finer_sizes)
        caching = {labels.get(info.caches) for labels in config}
    block_size = max(sizes, default=None)
    in_blocks = False
    if reader.in_blocks is not None and _chosen_name(found, profile.hit_tokens) == profile.hits_in_blocks + TOTAL:
        in_blocks = yield from _counts_blocks(reader.in_blocks, text)
    return PodReport(
        scraped_at=scraped_at,
        started_at=started_at,
        block_size=block_size,
        other_block_sizes=frozenset(sizes | finer) - {block_size or 0},
        caches_prefixes=b"True" in caching if caching & {b"True", b"False"} else None,
        engines=(yield from _engines(reader, found, tokens_each=block_size or 1 if in_blocks else 1)),
    )


def parse_started_at(text: bytes) -> Steps[float | None]:
    """Return when the API server's process started, in unix seconds by its own clock; None without a single value.

    Raise UnreadablePageError.
    """
    found = yield from read_series(_STARTED, text)
    started = [value for series in found.values() for _, value in series]
    return started[0] if len(started) == 1 and started[0] > 0 else None


def parse_latencies(text: bytes) -> Steps[tuple[Mapping[str, PodHistogram], Mapping[str, PodHistogram]]]:
    """Return the histograms of the time to the first token and of the time between tokens, by the pod's `model_name`.

    Summed over the pod's engines; an incomplete histogram is left out. Costs about 0.1 ms per page. Raise
    UnreadablePageError.
    """
    reader = yield from _reader_of(text)
    if reader is None:
        return {}, {}
    found = yield from read_series(reader.latencies, text)
    histograms = []
    for names in (reader.profile.first_token, reader.profile.inter_token):
        name = _histogram_name(found, names, BUCKET)
        histograms.append((yield from read_histograms(found.get(name + BUCKET, ()), found.get(name + SUM, ()))))
    return histograms[0], histograms[1]


def _reader_of(text: bytes) -> Steps[_Reader | None]:
    """Return the reader of the engine that the page shows; None for no known engine."""
    for begin, end in pieces(text):
        if begin:
            yield
        for reader in _READERS:
            if text.find(reader.profile.prefix, begin, end) >= 0:
                return reader
    return None


def _own(reader: _Reader, found: dict[bytes, list[Series]]) -> Steps[Found]:
    """Leave out series that are parts of others, and of replicas all but the greatest."""
    replicas, parts = reader.replicas, reader.parts
    if replicas is None or parts is None:
        return found
    owned: dict[bytes, list[Series]] = {}
    read = 0
    for name, series in found.items():
        greatest: dict[bytes, float] = {}
        for labels, value in series:
            read += LABELS_BYTES + len(labels)
            if read > STEP_BYTES:
                read = 0
                yield
            if name in reader.parted and parts.search(labels) is not None:
                continue
            told = replicas.sub(b"", labels)
            greatest[told] = max(value, greatest.get(told, 0.0))
        owned[name] = list(greatest.items())
    return owned


def _of(found: Found, name: bytes, label: bytes) -> Collection[Series]:
    series = found.get(name, ())
    return [each for each in series if label in each[0]] if label else series


def _series(found: Found, sources: Sum) -> Collection[Series]:
    if len(sources) == 1:  # the usual case
        return _of(found, *sources[0])
    return [each for name, label in sources for each in _of(found, name, label)]


def _present(found: Found, choices: Choices) -> Collection[Series]:
    """Return the series of the first choice that is on the page."""
    for sources in choices:
        if series := _of(found, *sources[0]):
            return series if len(sources) == 1 else _series(found, sources)
    return ()


def _chosen_name(found: Found, choices: Choices) -> bytes | None:
    return next((sources[0].name for sources in choices if _of(found, *sources[0])), None)


def _count(found: Found, choices: Choices) -> int:
    return _whole(_present(found, choices))


def _whole(series: Collection[Series]) -> int:
    if len(series) == 1:  # the usual case
        ((_, value),) = series
        return int(value)
    return min(sum([int(value) for _, value in series]), LARGEST_COUNT)


def _histogram_name(found: Found, names: tuple[bytes, ...], end: bytes) -> bytes:
    return next((name for name in names if name + end in found), names[-1])


def _counts_blocks(in_blocks: re.Pattern[bytes], text: bytes) -> Steps[bool]:
    for begin, end in pieces(text):
        if in_blocks.search(b"\n" + text[begin:end]):
            return True
        yield
    return False


def _says_no(series: Collection[Series], label: bytes) -> bool:
    return bool(label) and any(label + b'="False"' in labels for labels, _ in series)


def _capacity(profile: EngineProfile, found: Found) -> Steps[int | None]:
    """Return the capacity of the pod's KV cache in tokens, over all engines: blocks x block size."""
    tokens = 0
    if (info := profile.cache_info) is not None and info.name in found:
        names = info.block_tokens, info.blocks
        for labels in (yield from label_sets(found[info.name], names)):
            size, blocks = (labels.get(name, b"") for name in names)
            if not size.isdigit() or not blocks.isdigit() or max(len(size), len(blocks)) > LONGEST_NUMBER:
                return None
            tokens += int(size) * int(blocks)
    elif profile.capacity_tokens and _present(found, profile.capacity_tokens):
        tokens = _count(found, profile.capacity_tokens)
    elif sizes := _present(found, profile.block_tokens):
        tokens = _count(found, profile.blocks) * int(max(value for _, value in sizes))
    return tokens if 0 < tokens <= LARGEST_COUNT else None


def _numbers(config: list[dict[bytes, bytes]], names: tuple[bytes, ...]) -> set[int]:
    texts = [labels.get(name, b"") for labels in config for name in names]
    return {int(text) for text in texts if text.isdigit() and 0 < len(text) < 8 and int(text)}


def _adapters(named: Adapters | None, found: Found) -> tuple[frozenset[str], frozenset[str], int | None]:
    """Return the LoRA adapters that run and wait, and how many may be loaded.

    The gauge has a series for each combination so far; its value is the time, so the greatest is the current one.
    """
    if named is None:
        return frozenset(), frozenset(), None
    latest = max(found.get(named.name, ()), key=lambda each: each[1], default=(b"", 0.0))[0]
    labels = labels_of(latest, (named.most, named.running, named.waiting))
    most = labels.get(named.most, b"")
    return (
        _names(labels.get(named.running, b"")),
        _names(labels.get(named.waiting, b"")),
        int(most) if most.isdigit() and len(most) < 6 else None,
    )


def _names(text: bytes) -> frozenset[str]:
    return frozenset(name.strip() for name in text.decode("utf-8", "replace").split(",") if name.strip())


def _engines(reader: _Reader, found: Found, *, tokens_each: int) -> Steps[dict[int, EngineCounters] | None]:
    """Return the counters by engine, or None if essential ones are missing; `tokens_each`: per query or hit."""
    profile = reader.profile

    def of(series: Iterable[Series]) -> Steps[dict[int, int]]:
        """Sum the series by engine; pages that name no engine have one."""
        sums: dict[int, int] = {}
        read = 0
        for labels, value in series:
            engine = reader.rank.search(labels)
            number = int(engine[1]) if engine else 0
            sums[number] = min(sums.get(number, 0) + int(value), LARGEST_COUNT)
            read += LABELS_BYTES + len(labels)
            if read > STEP_BYTES:
                read = 0
                yield
        return sums

    prompts = yield from of(_present(found, profile.prompt_tokens))
    prefills = yield from of(found.get(_histogram_name(found, profile.first_token, COUNT) + COUNT, ()))
    running = yield from of(_present(found, profile.running))
    if not prompts or prompts.keys() != prefills.keys() or len(prompts) > MOST_ENGINES:
        return None
    if not running.keys() <= prompts.keys():
        return None  # tokens are counted for all engines together: it is unknown which of them computed them
    cached = yield from of(_present(found, profile.cached_tokens))
    generated = yield from of(_present(found, profile.generated_tokens))
    waiting = yield from of(_series(found, profile.waiting))
    queries = yield from of(_present(found, profile.queried_tokens))
    hits = yield from of(_present(found, profile.hit_tokens))
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

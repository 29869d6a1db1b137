"""A pod's page of metrics: its path by engine, its series and their labels: as much of Prometheus' format as needed.

No I/O: the caller gets pages. `engine_metrics` selects the series and knows their meaning. Long pages are read in steps
(`page_steps`).
"""

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from math import inf, isnan

from kvmesh.pods.engine_profiles import ENGINES, METRICS_PATHS
from kvmesh.pods.http_response import HttpResponse
from kvmesh.pods.page_steps import Steps, UnreadablePageError
from kvmesh.pods.pod_report import PodHistogram

Get = Callable[[str], Awaitable[HttpResponse]]  # GETs a path
MOST_MODEL_CHARACTERS = 200  # of a name that becomes a label
MOST_MODELS = 8  # of one pod; engines name one
LE, MODEL = b"le", b"model_name"
MOST_BUCKETS = 100  # of one histogram
Series = tuple[bytes, float]  # labels as written, and the value

# \b and possessive repeats: no byte is read twice, whatever fails to match
LABEL = re.compile(rb'\b(\w++)="((?:[^"\\]++|\\.)*+)"', re.DOTALL)
ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
MOST_SERIES = 1 << 14  # read by one function: a hundred for each engine, for as many engines as a page has room for
MAX_LINE_BYTES = PIECE_BYTES = 1 << 16  # of whole lines, searched in one step: the usual page has one or two
STEP_BYTES = 1 << 15  # of labels read in one step
LABELS_BYTES = 256  # cost of a line's labels apart from their length, in bytes of a step
LARGEST_COUNT = 10**15  # no pod reaches it, and sums of such numbers are exact


class MetricsPage:
    """Remembers the path of one pod's page."""

    __slots__ = ("_get", "path")

    def __init__(self, get: Get) -> None:
        self._get = get
        self.path = METRICS_PATHS[0]

    async def get(self) -> HttpResponse:
        """Return the page, at `path`; without one, the answer of the usual path. Raises the errors of `get`."""
        answers: dict[str, HttpResponse] = {}
        for path in (self.path, *METRICS_PATHS):
            if path not in answers:
                answers[path] = await self._get(path)
                if is_page(answers[path]):
                    self.path = path
                    return answers[path]
        self.path = METRICS_PATHS[0]
        return answers[self.path]


def is_page(response: HttpResponse) -> bool:
    """Tell whether it may be Prometheus' text format; TensorRT-LLM's /metrics is JSON."""
    return response.status == 200 and response.body.lstrip()[:1] not in (b"[", b"{")


def why_no_load(response: HttpResponse, path: str) -> str:
    """Return in words why the answer at this path has no load."""
    if response.status != 200:
        return f"{path} answered {response.status}"
    if not is_page(response):
        return f"{path} is JSON, and there is no /prometheus/metrics (TensorRT-LLM: return_perf_metrics: true)"
    return f"{path} shows the load of no engine that is known here ({ENGINES})"


def lines_of(prefix: bytes, names: Iterable[bytes]) -> re.Pattern[bytes]:
    """Return a pattern for name, labels and value of all lines of exactly these names; a timestamp may follow."""
    rests = _one_of({name.removeprefix(prefix) for name in names})
    return re.compile(rb"\n(" + prefix + rests + rb")(?:\{([^\n]*)\})?[ \t]++(\S++)")


def _one_of(words: Collection[bytes]) -> bytes:
    """Return a pattern for one of the words that reads no letter twice: lines of other names cost half as much."""
    low, high = min(words), max(words)  # the common beginning of these two is common to all
    shared = next((at for at, letters in enumerate(zip(low, high, strict=False)) if len(set(letters)) > 1), len(low))
    rests = {word[shared:] for word in words}
    if rests == {b""}:
        return low
    begins = sorted({rest[:1] for rest in rests})
    branches = [_one_of({rest for rest in rests if rest[:1] == begin}) for begin in begins if begin]
    return low[:shared] + b"(?:" + b"|".join(branches) + b")" + (b"?" if b"" in rests else b"")


def read_series(lines: re.Pattern[bytes], text: bytes) -> Steps[dict[bytes, list[Series]]]:
    """Return the series by name; series whose value is not a count are left out."""
    found: dict[bytes, list[Series]] = {}
    series = 0
    for begin, end in pieces(text):
        if begin:
            yield
        # so that the first line is found like any other
        for name, labels, number in lines.findall(b"\n" + text[begin:end]):
            series += 1
            try:
                value = float(number)
            except ValueError:
                continue
            if 0 <= value <= LARGEST_COUNT:  # false for NaN
                found.setdefault(name, []).append((labels, value))
        if series > MOST_SERIES:
            raise UnreadablePageError(f"/metrics has more than {MOST_SERIES} series of the names that are read")
    return found


def pieces(text: bytes) -> Iterator[tuple[int, int]]:
    """Return the bounds of pieces of whole lines."""
    begin, size = 0, len(text)
    while size - begin > PIECE_BYTES:
        end = text.rfind(b"\n", begin, begin + PIECE_BYTES)
        if end < 0:
            raise UnreadablePageError(f"/metrics has a line of more than {MAX_LINE_BYTES} bytes")
        yield begin, end
        begin = end + 1
    yield begin, size


def label_sets(series: Iterable[Series], wanted: Collection[bytes]) -> Steps[list[dict[bytes, bytes]]]:
    """Return the wanted labels of each series."""
    sets = []
    read = 0
    for written, _ in series:
        sets.append(labels_of(written, wanted))
        read += LABELS_BYTES + len(written)
        if read > STEP_BYTES:
            read = 0
            yield
    return sets


def labels_of(written: bytes, wanted: Collection[bytes]) -> dict[bytes, bytes]:
    """Return the wanted labels of a series, as written."""
    return {name: value for name, value in LABEL.findall(written) if name in wanted}


def plain(escaped: bytes) -> str:
    """Return a label's unescaped value."""
    text = ESCAPED.sub(lambda found: b"\n" if found[1] == b"n" else found[1], escaped)
    return text.decode("utf-8", "replace")


def read_histograms(buckets: Collection[Series], sums: Collection[Series]) -> Steps[Mapping[str, PodHistogram]]:
    """Return the histograms by model name from their series; unreadable or incomplete ones are left out."""
    counts: dict[bytes, dict[float, float]] = {}  # model -> bound -> observations up to it
    read = 0
    for written, count in buckets:
        labels = labels_of(written, (LE, MODEL))
        bound, model = _bound(labels.get(LE, b"")), labels.get(MODEL, b"")
        of_model = counts.setdefault(model, {}) if model in counts or len(counts) < MOST_MODELS else {}
        if bound is not None and len(of_model) < MOST_BUCKETS:
            of_model[bound] = of_model.get(bound, 0.0) + count
        read += LABELS_BYTES + len(written)
        if read > STEP_BYTES:
            read = 0
            yield
    seconds: dict[bytes, float] = {}
    of_sums = yield from label_sets(sums, (MODEL,))
    for labels, (_, some) in zip(of_sums, sums, strict=True):
        model = labels.get(MODEL, b"")
        seconds[model] = seconds.get(model, 0.0) + some
    found: dict[str, PodHistogram] = {}
    for model, of_model in counts.items():
        bounds = tuple(sorted(of_model))
        cumulative = tuple(of_model[bound] for bound in bounds)
        if model in seconds and bounds[-1:] == (inf,) and cumulative == tuple(sorted(cumulative)):
            found[plain(model)[:MOST_MODEL_CHARACTERS]] = PodHistogram(
                bounds=bounds, counts=cumulative, seconds=seconds[model]
            )
    return found


def _bound(text: bytes) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if isnan(bound) or bound < 0 else bound

"""Metrics under the names of the Gateway API inference extension, for dashboards and autoscalers that know them.

`inference_pool_*` and `inference_objective_*` of its release 1.5.0, beside those of `extension_scheduling`: names,
types, labels and buckets are its own; a test compares them with its list. Left out is what would need every answer to
be read (docs/reference/metrics.md). Off unless asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from statistics import fmean

from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.telemetry.extension_scheduling import SCHEDULING_METRICS, ExtensionScheduling
from extproc.telemetry.metrics import OTHER
from kvmesh.metrics.metric import Metric, Over, counter, gauge, histogram
from kvmesh.metrics.registry import Histogram, Reading, Registry, Value

MOST_MODELS = 100  # pairs of names with series of their own
_MODEL = ("model_name", "target_model_name")
_DURATIONS = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0),
    *(30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0),
)
_SIZES = tuple(float(1 << power) for power in range(6, 31))
_TOKENS = (
    *(1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0),
    32778.0,  # as it is there
    *(65536.0, 131072.0, 262144.0, 524288.0, 1048576.0),
)

KV_CACHE = gauge(
    "inference_pool_average_kv_cache_utilization",
    "Mean share of the KV cache in use, of the ready pods with a fresh report.",
    "name",
    over=Over.EACH,
)
QUEUE_SIZE = gauge(
    "inference_pool_average_queue_size", "Mean number of requests that wait at these pods.", "name", over=Over.EACH
)
RUNNING = gauge(
    "inference_pool_average_running_requests", "Mean number of requests that these pods run.", "name", over=Over.EACH
)
READY_PODS = gauge("inference_pool_ready_pods", "Ready pods with a fresh report.", "name", over=Over.EACH)
POD_QUEUE_SIZE = gauge(
    "inference_pool_per_pod_queue_size",
    "Requests that wait at a pod, by its last report.",
    "name",
    "model_server_pod",
    over=Over.EACH,
)
REQUESTS = counter("inference_objective_request_total", "Requests that were given a pod.", *_MODEL, "priority")
ERRORS = counter(
    "inference_objective_request_error_total",
    "Requests that were refused, and answers of pods other than 200.",
    *_MODEL,
    "error_code",
)
DURATION = histogram(
    "inference_objective_request_duration_seconds",
    "From a request's last byte to the end of its exchange, of requests that were answered by a pod.",
    *_MODEL,
    bounds=_DURATIONS,
)
SIZES = histogram("inference_objective_request_sizes", "Bytes of the requests' bodies.", *_MODEL, bounds=_SIZES)
INPUT_TOKENS = histogram(
    "inference_objective_input_tokens",
    "Tokens of the prompts whose tokens are known exactly.",
    *_MODEL,
    bounds=_TOKENS,
)
PREDICTED_TTFT = histogram(
    "inference_objective_request_predicted_ttft_seconds",
    "Time to the first token that a pick expects.",
    *_MODEL,
    bounds=_DURATIONS,
)
RUNNING_REQUESTS = gauge(
    "inference_objective_running_requests", "Requests that were given a pod and have not ended.", "model_name"
)
EXTENSION_METRICS: Sequence[Metric] = (
    *(KV_CACHE, QUEUE_SIZE, RUNNING, READY_PODS, POD_QUEUE_SIZE),
    *(REQUESTS, ERRORS, DURATION, SIZES, INPUT_TOKENS, PREDICTED_TTFT, RUNNING_REQUESTS),
    *SCHEDULING_METRICS,
)

# its words for what a client is told (pkg/common/error)
_ERROR_CODES: Mapping[int, str] = {
    HTTPStatus.BAD_REQUEST: "BadRequest",
    HTTPStatus.UNAUTHORIZED: "Unauthorized",
    HTTPStatus.FORBIDDEN: "Forbidden",
    HTTPStatus.NOT_FOUND: "NotFound",
    HTTPStatus.TOO_MANY_REQUESTS: "ResourceExhausted",
    HTTPStatus.INTERNAL_SERVER_ERROR: "Internal",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailable",
}
_MODEL_SERVER_ERROR = "ModelServerError"


def error_code(status: int) -> str:
    """Return its word for a refusal with this status; of other mistakes of clients the most general one."""
    if (word := _ERROR_CODES.get(status)) is not None:
        return word
    return "BadRequest" if 400 <= status < 500 else "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """The model that a request asks for, and the one that its pod is asked for: configured names, "" or `other`."""

    requested: str
    target: str


@dataclass(slots=True, kw_only=True)
class _OfModel:
    """The series of one pair of names."""

    names: ModelNames
    durations: Histogram
    sizes: Histogram
    input_tokens: Histogram
    predicted: Histogram
    running: Value


@dataclass(slots=True, kw_only=True)
class CountedRequest:
    """A request that was given a pod, until it ends."""

    counts: "ExtensionTelemetry"
    of_model: _OfModel
    arrived_at: float  # monotonic seconds

    def ended(self, *, status: int, now: float, trace_id: str = "") -> None:
        """Count its end; `status` is the pod's, 0 where none came; `trace_id` "": it is not traced."""
        self.of_model.running.value -= 1
        if status:
            self.of_model.durations.observe(max(now - self.arrived_at, 0.0), trace_id)
        if status not in {0, HTTPStatus.OK}:
            self.counts.failed(self.of_model.names, _MODEL_SERVER_ERROR)


class ExtensionTelemetry:
    """What is counted of one pool under these names."""

    def __init__(self, registry: Registry, *, most_models: int = MOST_MODELS) -> None:
        self.scheduling = ExtensionScheduling(registry)
        self._registry = registry
        self._most_models = most_models
        self._requests = registry.values(REQUESTS)
        self._errors = registry.values(ERRORS)
        self._durations = registry.histograms(DURATION)
        self._sizes = registry.histograms(SIZES)
        self._input_tokens = registry.histograms(INPUT_TOKENS)
        self._predicted = registry.histograms(PREDICTED_TTFT)
        self._running = registry.values(RUNNING_REQUESTS)
        self._models: dict[ModelNames, _OfModel] = {}

    def routed(
        self, names: ModelNames, *, priority: int, arrived_at: float, body_bytes: int | None, input_tokens: int | None
    ) -> CountedRequest:
        """Count a request that was given a pod. None: its body did not come here, its tokens are not known exactly."""
        of_model = self._of_model(names)
        self._requests.of(of_model.names.requested, of_model.names.target, str(priority)).value += 1
        of_model.running.value += 1
        if body_bytes is not None:
            of_model.sizes.observe(body_bytes)
        if input_tokens:
            of_model.input_tokens.observe(input_tokens)
        return CountedRequest(counts=self, of_model=of_model, arrived_at=arrived_at)

    def predicted(self, names: ModelNames, *, seconds: float) -> None:
        """Count the time to the first token that a pick expects."""
        self._of_model(names).predicted.observe(seconds)

    def refused(self, names: ModelNames, *, status: int) -> None:
        """Count a request that the picker has answered itself."""
        self.failed(self._of_model(names).names, error_code(status))

    def failed(self, names: ModelNames, code: str) -> None:
        """Count an error; `code` is of a closed set."""
        self._errors.of(names.requested, names.target, code).value += 1

    def show(
        self, name: str, *, known: Callable[[], Sequence[EndpointStatus]], pods: Callable[[], Mapping[str, str]]
    ) -> None:
        """Show the pool's endpoints at each scrape; to be called once. `pods`: in words, by address, where known."""
        self._registry.read(lambda: _pool(name, known(), pods()))

    def _of_model(self, names: ModelNames) -> _OfModel:
        return self._models.get(names) or self._new(names)

    def _new(self, names: ModelNames) -> _OfModel:
        if len(self._models) >= self._most_models:
            names = ModelNames(requested=OTHER, target=OTHER)
        labels = (names.requested, names.target)
        return self._models.setdefault(
            names,
            _OfModel(
                names=names,
                durations=self._durations.of(*labels),
                sizes=self._sizes.of(*labels),
                input_tokens=self._input_tokens.of(*labels),
                predicted=self._predicted.of(*labels),
                running=self._running.of(names.requested),
            ),
        )


def _pool(name: str, statuses: Sequence[EndpointStatus], pods: Mapping[str, str]) -> Reading:
    told = [(each.address, each.load) for each in statuses if each.load is not None]
    ready = {each.address for each in statuses if each.reachability is Reachability.READY}
    loads = [load for address, load in told if address in ready]
    yield READY_PODS, [((name,), len(loads))]
    for metric, values in (
        (KV_CACHE, [load.kv_usage for load in loads]),
        (QUEUE_SIZE, [float(load.waiting_requests) for load in loads]),
        (RUNNING, [float(load.running_requests) for load in loads]),
    ):
        yield metric, [((name,), fmean(values))] if values else []  # of no pods there is no mean
    yield POD_QUEUE_SIZE, [((name, pods.get(address, address)), load.waiting_requests) for address, load in told]

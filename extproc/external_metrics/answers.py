"""What is answered to a GET of the external-metrics API: a status and a JSON object. Pure.

An autoscaler adds up all values of a list, and the roles of a pool added up mean nothing. So a selector has to leave
one. On an error it leaves the number of pods alone: that is what a figure is answered with that is not known.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from extproc.external_metrics import api_objects
from extproc.external_metrics.api_objects import GROUP, GROUP_VERSION, Json
from extproc.external_metrics.label_selector import SelectorError, parse_selector
from extproc.scaling.seen import Signal, State

SHOWN = 20  # names in an error
LABELS = ("pool", "role")
_VALUES_PATH = re.compile(rf"/apis/{re.escape(GROUP_VERSION)}/namespaces/([^/]+)/([^/]+)")
# states in which work and arrivals are measured
_MEASURED = frozenset({State.OK, State.PROMISE_OUT_OF_REACH})


class AnsweredPools(Protocol):
    """See `pools.Pools`."""

    @property
    def names(self) -> Sequence[str]:
        """Return the pools' names, each "namespace/name"."""

    def signals(self, name: str) -> Mapping[str, Signal] | None:
        """Return the signals of a pool by role; None: there is no such pool."""

    def scaled_roles(self, name: str) -> Collection[str]:
        """Return the roles of a pool for which its policy wants a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a request."""

    code: int
    body: Json


class AnswerError(Exception):
    """There is no value; the message says why, and what there is."""

    def __init__(self, code: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.code = code


def _pods_to_have(signal: Signal) -> float | None:
    """Return what scalers are told, or None for a number that rests on no measured load and asks for no more pods.

    A picker that has just started knows the pods that there are, and not those that are asked for and not there yet.
    """
    return float(signal.told) if signal.state in _MEASURED or signal.told > signal.present else None


def _queued_tokens(signal: Signal) -> float | None:
    """Return what waits; without ready pods, that is all that waits in the pickers."""
    return signal.queued_tokens if signal.state in _MEASURED | {State.NO_READY_PODS} else None


def _measured(figure: Callable[[Signal], float | None]) -> Callable[[Signal], float | None]:
    return lambda signal: figure(signal) if signal.state in _MEASURED else None


METRICS: Mapping[str, Callable[[Signal], float | None]] = {
    "kvmesh-wanted-replicas": _pods_to_have,
    "kvmesh-queued-tokens": _queued_tokens,
    "kvmesh-input-tokens-per-second": _measured(lambda signal: signal.input_tokens_per_second),
    "kvmesh-cached-tokens-per-second": _measured(lambda signal: signal.cached_tokens_per_second),
    "kvmesh-output-tokens-per-second": _measured(lambda signal: signal.output_tokens_per_second),
    "kvmesh-saturation": _measured(lambda signal: signal.saturation),
}


def answer(path: str, selector: str, pools: AnsweredPools, *, timestamp: str) -> Answer:
    """Answer a GET of a path; `selector` is the query's labelSelector, `timestamp` the time now in RFC 3339."""
    pages: Mapping[str, Callable[[], Json]] = {
        "/apis": api_objects.groups,
        f"/apis/{GROUP}": api_objects.group,
        f"/apis/{GROUP_VERSION}": lambda: api_objects.resources(METRICS),
    }
    try:
        if (page := pages.get(path.rstrip("/"))) is not None:
            return Answer(code=HTTPStatus.OK, body=page())
        found = _VALUES_PATH.fullmatch(path)
        if found is None:
            raise AnswerError(HTTPStatus.NOT_FOUND, f"there is nothing at this path but /apis/{GROUP_VERSION}")
        namespace, metric = found[1], found[2]
        labels, value = _value(namespace, metric, selector, pools)
    except AnswerError as error:
        return Answer(code=error.code, body=api_objects.status(error.code, str(error)))
    return Answer(code=HTTPStatus.OK, body=api_objects.values(metric, labels, value, timestamp=timestamp))


def _value(namespace: str, metric: str, selector: str, pools: AnsweredPools) -> tuple[Mapping[str, str], float]:
    read = METRICS.get(metric)
    if read is None:
        raise AnswerError(HTTPStatus.NOT_FOUND, f"there is no metric {metric[:100]!r}; there are {', '.join(METRICS)}")
    name, role = _selected(namespace, selector, pools)
    signal = (pools.signals(name) or {}).get(role)
    words = f"{metric} of the pool {name}, role {role}, is not known"
    if signal is None:
        raise AnswerError(HTTPStatus.SERVICE_UNAVAILABLE, f"{words}: this picker has not looked at it yet")
    value = read(signal)
    if value is None:
        because = f"{signal.state.value}: {signal.reason}" if signal.state is not State.OK else "too few reports yet"
        raise AnswerError(HTTPStatus.SERVICE_UNAVAILABLE, f"{words} ({because})")
    return {"pool": name.partition("/")[2], "role": role}, value


def _selected(namespace: str, text: str, pools: AnsweredPools) -> tuple[str, str]:
    """Return the pool and the role that the selector leaves."""
    try:
        selector = parse_selector(text, known=LABELS)
    except SelectorError as error:
        raise AnswerError(
            HTTPStatus.BAD_REQUEST, f"the label selector {text[:200]!r} cannot be read: {error}"
        ) from None
    if not pools.names:
        raise AnswerError(HTTPStatus.SERVICE_UNAVAILABLE, "no pool is known to this picker yet")
    own = sorted(name for name in pools.names if name.startswith(f"{namespace}/"))
    scaled = [(name, role) for name in own for role in pools.scaled_roles(name)]
    left = [each for each in scaled if selector.selects(_labels(*each))]
    if len(left) == 1:
        return left[0]
    if left:
        raise AnswerError(
            HTTPStatus.BAD_REQUEST,
            f"the label selector {text[:200]!r} leaves {len(left)} series, which an autoscaler would add up "
            f"({_shown(left)}): name the pool and the role in matchLabels",
        )
    raise AnswerError(HTTPStatus.NOT_FOUND, _nothing(namespace, text, own, scaled))


def _nothing(namespace: str, text: str, own: Sequence[str], scaled: Sequence[tuple[str, str]]) -> str:
    if not own:
        return f"no pool of the namespace {namespace[:100]!r} is known here"
    if not scaled:
        return f"no policy's autoscale names a role of the namespace's pools ({', '.join(own[:SHOWN])})"
    return f"the label selector {text[:200]!r} leaves nothing of what there is in {namespace[:100]!r}: {_shown(scaled)}"


def _shown(series: Sequence[tuple[str, str]]) -> str:
    words = ["pool={pool},role={role}".format_map(_labels(*each)) for each in series[:SHOWN]]
    return "; ".join([*words, "..."] if len(series) > SHOWN else words)


def _labels(name: str, role: str) -> Mapping[str, str]:
    return {"pool": name.partition("/")[2], "role": role}

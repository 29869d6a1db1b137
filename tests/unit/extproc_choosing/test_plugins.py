"""Plug-ins: what is installed takes part; what fails, is slow or returns nonsense is skipped and named."""

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from extproc.choosing import plugins
from extproc.choosing.decision import FILTERS, apply_filters, prefillers
from extproc.choosing.plugins import MOST_SECONDS, load_plugins
from extproc.choosing.scorers import SCORERS
from extproc.errors import ConfigError
from extproc.pods.endpoint import NOTHING_ASKED, Candidate, Role
from extproc.policy.values import PickPolicy
from tests.unit.extproc_choosing.pick_candidates import candidate, decided

PODS = [candidate("a:1"), candidate("b:1", reported=None)]
SECONDS = {"took": 0.0}


def last(candidates: Sequence[Candidate], *_: object) -> list[float]:
    return [0.0] * (len(candidates) - 1) + [1.0]


def failing(*_: object) -> list[float]:
    raise ValueError("no such rack")


def not_a_number(*_: object) -> list[float]:
    return [float("nan"), 1.0]


def too_few(*_: object) -> list[float]:
    return [1.0]


def none(*_: object) -> None:
    return None


def slow(candidates: Sequence[Candidate], *_: object) -> list[float]:
    SECONDS["took"] += 2 * MOST_SECONDS
    return last(candidates)


def drops_another(*_: object) -> dict[str, str]:
    return {"c:1": "drained"}


def gives_no_text(*_: object) -> dict[str, int]:
    return {"a:1": 1}


def drops_all(candidates: Sequence[Candidate], *_: object) -> dict[str, str]:
    return {candidate.address: "drained" for candidate in candidates}


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(SCORERS), dict(FILTERS)
    monkeypatch.setattr(plugins.Plugin, "__init__", with_clock(plugins.Plugin.__init__))
    yield
    SCORERS.clear()
    SCORERS.update(before[0])
    FILTERS.clear()
    FILTERS.update(before[1])


def with_clock(init: Callable[..., None]) -> Callable[..., None]:
    return lambda self, **fields: init(self, **fields, clock=lambda: SECONDS["took"])


def install(monkeypatch: pytest.MonkeyPatch, group: str, **calls: str) -> None:
    entries = [EntryPoint(name.replace("_", "-"), f"{__name__}:{call}", group) for name, call in calls.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda *, group: [each for each in entries if each.group == group])
    load_plugins()


def pick(*, scorer: str | None = None) -> Any:
    weights = {"queue-depth": 1.0} | ({scorer: 10.0} if scorer else {})
    policy = PickPolicy(weights=weights)
    return decided(PODS, policy=policy, prompt_tokens=1000, degraded={}, tie_break=lambda: 0.0)


def test_a_scorer_has_its_weight_in_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "kvmesh.scorers", last_one="last")
    decision = pick(scorer="last-one")
    assert (decision.endpoints[0], decision.scores["last-one"], decision.degraded) == ("b:1", [0.0, 1.0], {})
    assert decision.weights == {"queue-depth": 1.0, "last-one": 10.0}


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("failing", "failed with ValueError: no such rack"),
        ("too_few", "returned 1 scores for 2 endpoints"),
        ("not_a_number", "returned a score outside 0 to 1"),
        ("none", "failed with TypeError: object of type 'NoneType' has no len()"),
        ("slow", "took 10.0 ms, at most 5 are allowed"),
        (None, "is not installed in this picker"),
    ],
)
def test_a_faulty_scorer_is_skipped_and_named(monkeypatch: pytest.MonkeyPatch, call: str | None, fault: str) -> None:
    install(monkeypatch, "kvmesh.scorers", **({"other": call} if call else {}))
    decision = pick(scorer="other")
    assert (decision.endpoints[0], decision.weights) == ("a:1", {"queue-depth": 1.0})
    assert decision.degraded == {"plugin-other": f"other {fault}"}


def test_a_slow_scorer_rests_a_hundred_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "kvmesh.scorers", other="slow")
    pick(scorer="other")
    SECONDS["took"] += 190 * MOST_SECONDS
    assert pick(scorer="other").degraded == {"plugin-other": "other was slow and rests for 0.04 s"}
    SECONDS["took"] += 10 * MOST_SECONDS
    assert "took 10.0 ms" in pick(scorer="other").degraded["plugin-other"]


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("failing", "failed with ValueError: no such rack"),
        ("drops_another", "dropped an address that is no candidate"),
        ("gives_no_text", "returned a reason that is no text"),
    ],
)
def test_a_faulty_filter_is_skipped_and_named(monkeypatch: pytest.MonkeyPatch, call: str, fault: str) -> None:
    install(monkeypatch, "kvmesh.filters", broken=call)
    assert apply_filters(PODS) == (PODS, {}, {"plugin-broken": f"broken {fault}"})


def test_filters_also_apply_to_prefill_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "kvmesh.filters", broken="failing")
    pods = [candidate("p:1", role=Role.PREFILL)]
    assert prefillers(pods, NOTHING_ASKED) == pods
    FILTERS["broken"] = drops_all
    assert prefillers(pods, NOTHING_ASKED) == []


def test_a_plugin_that_cannot_be_loaded_or_takes_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot load scorer 'lost' of the package \?: .*; fix or remove it"):
        install(monkeypatch, "kvmesh.scorers", lost="nowhere")
    with pytest.raises(ConfigError, match=r"kvmesh has a filter 'ready' of its own: rename"):
        install(monkeypatch, "kvmesh.filters", ready="drops_all")

"""The leader writes what is wanted, after a dry run, and names what is in the way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from extproc.pools.scale_acts import ScaleActs
from extproc.scaling.acting import ActOutcome, ActState, ScaleWish
from kvmesh.documents.scales import ScaleRequestError, SeenScale


@dataclass
class Cluster:
    """Deployments with their replicas; `fails` at what."""

    replicas: dict[str, int]
    autoscalers: dict[str, str] = field(default_factory=dict)
    fails: dict[str, ScaleRequestError] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def _may(self, what: str) -> None:
        self.requests.append(what)
        if (error := self.fails.get(what.split(maxsplit=1)[0])) is not None:
            raise error

    async def read(self, namespace: str, name: str) -> SeenScale:
        self._may("read")
        if name not in self.replicas:
            raise ScaleRequestError(f'404 NotFound: deployments.apps "{name}" not found', code=404)
        return SeenScale(replicas=self.replicas[name], version="1")

    async def write(self, namespace: str, name: str, replicas: int, *, seen: SeenScale, dry_run: bool) -> None:
        self._may(f"{'try' if dry_run else 'write'} {name} {replicas}")
        if not dry_run:
            self.replicas[name] = replicas

    async def autoscaler_of(self, namespace: str, name: str) -> str | None:
        self._may("autoscaler")
        return self.autoscalers.get(name)


@dataclass
class Desk:
    cluster: Cluster
    wishes: Sequence[ScaleWish] = ()
    outcomes: Sequence[ActOutcome] = ()
    leads: bool = True
    now: float = 0.0
    acts: Any = None

    def __post_init__(self) -> None:
        self.acts = ScaleActs(self, self.cluster, leads=lambda: self.leads, clock=lambda: self.now)

    def scale_wishes(self) -> Sequence[ScaleWish]:
        return self.wishes

    def note_acts(self, outcomes: Sequence[ActOutcome]) -> None:
        self.outcomes = outcomes

    async def look(self, seconds: float = 20.0) -> tuple[ActState, str]:
        self.now += seconds
        await self.acts.act()
        return self.outcomes[0].state, self.outcomes[0].words

    @property
    def written(self) -> list[str]:
        return [each for each in self.cluster.requests if each.startswith(("try", "write"))]


def wish(replicas: int, *, deployment: str = "a", role: str = "both") -> ScaleWish:
    return ScaleWish(
        pool="llm/p",
        role=role,
        variant="",
        namespace="llm",
        deployment=deployment,
        replicas=replicas,
        may_lower=True,
        window_seconds=100.0,
    )


async def test_it_is_tried_before_the_first_write_and_not_again() -> None:
    desk = Desk(Cluster({"a": 2}), [wish(9)])
    assert await desk.look() == (ActState.WRITTEN, "2 -> 6")
    assert await desk.look() == (ActState.WRITTEN, "6 -> 9")
    assert await desk.look() == (ActState.AS_WANTED, "")
    assert desk.written == ["try a 6", "write a 6", "write a 9"]


async def test_a_dry_run_that_fails_is_a_named_state_and_nothing_is_written() -> None:
    desk = Desk(Cluster({"a": 2}, fails={"try": ScaleRequestError("403 Forbidden: no", code=403)}), [wish(4)])
    state, words = await desk.look()
    assert (state, words) == (
        ActState.FORBIDDEN,
        "the picker may not (kvmesh install --scale-deployments gives it the right): 403 Forbidden: no",
    )
    assert desk.cluster.replicas == {"a": 2}
    desk.cluster.fails.clear()
    assert (await desk.look())[0] is ActState.WRITTEN


async def test_who_does_not_lead_writes_nothing_and_tries_anew_once_it_leads() -> None:
    desk = Desk(Cluster({"a": 2}), [wish(4)], leads=False)
    assert await desk.look() == (ActState.NOT_LEADING, "another picker leads and writes")
    assert not desk.cluster.requests
    desk.leads = True
    await desk.look()
    assert desk.written == ["try a 4", "write a 4"]


async def test_an_autoscaler_of_the_same_deployment_decides() -> None:
    desk = Desk(Cluster({"a": 2}, autoscalers={"a": "keda-hpa-a"}), [wish(4)])
    state, words = await desk.look()
    assert state is ActState.AUTOSCALER
    assert words.startswith("HorizontalPodAutoscaler keda-hpa-a has it for its target")
    assert not desk.written
    desk.wishes = [wish(2)]  # also where nothing is to be written, it is named
    assert (await desk.look(60.0))[0] is ActState.AUTOSCALER
    desk.cluster.autoscalers.clear()
    desk.wishes = [wish(4)]
    assert (await desk.look())[0] is ActState.WRITTEN


async def test_a_deployment_that_two_name_is_written_by_none() -> None:
    desk = Desk(Cluster({"a": 2, "b": 1}), [wish(4), wish(5, role="decode"), wish(3, deployment="b")])
    await desk.look()
    assert [each.state for each in desk.outcomes] == [ActState.NAMED_TWICE, ActState.NAMED_TWICE, ActState.WRITTEN]
    assert desk.cluster.replicas == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (404, ActState.NOT_FOUND),
        (401, ActState.FORBIDDEN),
        (422, ActState.REFUSED),
        (429, ActState.UNREACHABLE),
        (503, ActState.UNREACHABLE),
        (None, ActState.UNREACHABLE),
        (409, ActState.IN_STEPS),
    ],
)
async def test_each_failure_has_its_state_and_the_next_look_goes_on(code: int | None, state: ActState) -> None:
    desk = Desk(Cluster({"a": 2}, fails={"write": ScaleRequestError("so", code=code)}), [wish(4)])
    assert (await desk.look())[0] is state
    desk.cluster.fails.clear()
    assert (await desk.look())[0] is ActState.WRITTEN


async def test_where_autoscalers_may_not_be_seen_nothing_is_written() -> None:
    desk = Desk(Cluster({"a": 2}, fails={"autoscaler": ScaleRequestError("403 Forbidden", code=403)}), [wish(4)])
    assert (await desk.look())[0] is ActState.FORBIDDEN
    assert not desk.written


async def test_what_is_wrong_is_logged_once_and_that_it_is_mended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    desk = Desk(Cluster({}), [wish(4)])
    for _ in range(3):
        await desk.look()
    assert caplog.text.count("Deployment llm/a is not scaled: there is no Deployment llm/a") == 1
    desk.cluster.replicas["a"] = 4
    await desk.look()
    assert "Deployment llm/a is scaled again" in caplog.text

"""What follows from pods' answers and the registry."""

import pytest

from kv_indexer.pools.members import PodAnswer, known_streams, vanished_streams
from kvmesh.blocks.source import EventAddresses, Stream

HERE, THERE = EventAddresses(events="tcp://a:1"), EventAddresses(events="tcp://a:2", replay="tcp://a:3")


def test_every_rank_that_a_pod_names_is_a_stream() -> None:
    answers = {
        "a:1": PodAnswer(asked_at=1.0, ranks={0: HERE, 1: THERE}),
        "b:1": PodAnswer(asked_at=1.0, ranks={}),
    }

    assert known_streams(answers) == {
        Stream(endpoint="a:1", dp_rank=0): HERE,
        Stream(endpoint="a:1", dp_rank=1): THERE,
    }


@pytest.mark.parametrize(
    ("answers", "registered_at", "expected"),
    [
        pytest.param({}, 1.0, False, id="a pod that has not answered proves nothing"),
        pytest.param({"b:1": PodAnswer(asked_at=2.0, ranks={})}, 1.0, False, id="nor does another pod"),
        pytest.param({"a:1": PodAnswer(asked_at=2.0, ranks={0: HERE})}, 1.0, True, id="a later answer without it does"),
        pytest.param({"a:1": PodAnswer(asked_at=2.0, ranks={})}, 1.0, True, id="an answer without any rank does"),
        pytest.param({"a:1": PodAnswer(asked_at=2.0, ranks={1: HERE})}, 1.0, False, id="an answer with it does not"),
        pytest.param({"a:1": PodAnswer(asked_at=1.0, ranks={})}, 1.0, False, id="nor one as old as the record"),
        pytest.param({"a:1": PodAnswer(asked_at=0.5, ranks={})}, 1.0, False, id="nor one older than the record"),
    ],
)
def test_a_registered_stream_has_vanished_when_its_pod_was_asked_since_and_does_not_name_it(
    answers: dict[str, PodAnswer], registered_at: float, expected: bool
) -> None:
    stream = Stream(endpoint="a:1", dp_rank=1)

    assert vanished_streams(answers, {stream: registered_at}) == (frozenset({stream}) if expected else frozenset())

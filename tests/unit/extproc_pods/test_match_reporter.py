"""What the picker says of pods whose hits it never predicts."""

import logging

import pytest

from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pools.prediction_reports import MatchReporter
from extproc.prefixes.match_watch import MatchWatch
from kvmesh.pods.pod_report import EndpointLoad

POD = "10.0.0.1:8000"


class Display:
    def __init__(self) -> None:
        self.shown: list[tuple[str, str, bool]] = []

    def finding(self, *, endpoint: str, reason: str, stands: bool) -> None:
        self.shown.append((endpoint, reason, stands))


class Pod:
    """Counts as a pod does; every prompt is found in its cache."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tokens = 0

    def statuses(self, now: float) -> list[EndpointStatus]:
        load = EndpointLoad(
            waiting_requests=0,
            running_requests=0,
            kv_usage=0.0,
            prefix_hit_tokens=self.tokens,
            prefix_query_tokens=self.tokens,
            reported_at=now,
        )
        return [EndpointStatus(address=POD, reachability=Reachability.READY, load=load)]

    def serve(self, watch: MatchWatch, *, matched_tokens: int) -> None:
        for _ in range(60):
            watch.routed(POD, prompt_tokens=100, matched_tokens=matched_tokens)
            self.tokens += 100
        self.now += 31


def test_a_finding_is_said_once_when_it_comes_and_once_when_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    pod, watch, display = Pod(), MatchWatch(), Display()
    reporter = MatchReporter(watch=watch, endpoints=pod.statuses, show=display.finding, clock=lambda: pod.now)
    reporter.look()
    with caplog.at_level(logging.INFO):
        for matched_tokens in (0, 0, 100, 100):
            pod.serve(watch, matched_tokens=matched_tokens)
            reporter.look()

    assert display.shown == [(POD, "never-matches", True), (POD, "never-matches", False)]
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["ERROR", "INFO"]
    assert "compare --model, --hash-seed" in said[0][1]
    assert said[1][1] == f"never-matches: predictions for {POD} are right again"

"""Prompts that the pod finds in its cache and the picker never predicts: found, explained, healed, and not mistaken."""

from dataclasses import dataclass

import pytest

from extproc.prefixes.match_watch import NEVER_MATCHES, MatchFinding, MatchPolicy, MatchWatch

POD = "10.0.0.1:8000"


@dataclass
class Traffic:
    """One pod and what is sent to it."""

    watch: MatchWatch
    now: float = 1000.0
    hits: int = 0
    queries: int = 0

    def scrape(self, *, seconds: float = 1.0) -> None:
        self.now += seconds
        self.watch.reported(POD, hit_tokens=self.hits, query_tokens=self.queries, now=self.now)

    def send(self, requests: int, *, prompt: int = 100, hit: int = 0, predicted: int = 0, ours: bool = True) -> None:
        for _ in range(requests):
            self.hits += hit
            self.queries += prompt
            if ours:
                self.watch.routed(POD, prompt_tokens=prompt, matched_tokens=predicted)

    def found(self) -> list[str]:
        return [finding.reason for finding in self.watch.findings.values()]


@pytest.fixture
def traffic() -> Traffic:
    traffic = Traffic(MatchWatch(MatchPolicy()))
    traffic.scrape()
    return traffic


def test_prompts_that_never_match_while_the_pod_hits_are_found_with_what_to_compare_and_heal(traffic: Traffic) -> None:
    traffic.send(50, hit=80)
    traffic.scrape(seconds=29)
    assert traffic.found() == []
    traffic.scrape()

    assert dict(traffic.watch.findings) == {
        POD: MatchFinding(
            endpoint=POD,
            reason=NEVER_MATCHES,
            since=1001.0,
            message="10.0.0.1:8000 found about 4000 tokens of our last 50 prompts in its cache, 0 were predicted: "
            "compare --model, --hash-seed, the --tokenizer folder and its chat template with the pod's and the "
            "indexer's: `kvmesh explain` shows the prompt and its tokens, the pod's POST /tokenize what it should be",
        )
    }
    traffic.send(60, hit=80)
    traffic.scrape(seconds=30)
    assert [finding.since for finding in traffic.watch.findings.values()] == [1001.0]  # it goes on

    traffic.send(50, hit=80, predicted=80)
    traffic.scrape(seconds=30)
    assert traffic.found() == []


@pytest.mark.parametrize(
    ("requests", "hit", "predicted"),
    [
        pytest.param(500, 0, 0, id="a cold cache"),
        pytest.param(49, 80, 0, id="too few requests"),
        pytest.param(500, 80, 80, id="what was predicted"),
        pytest.param(500, 80, 9, id="a little was predicted: the index lags, but it is not blind"),
        pytest.param(500, 2, 0, id="next to nothing was hit"),
    ],
)
def test_it_is_no_finding(traffic: Traffic, requests: int, hit: int, predicted: int) -> None:
    traffic.send(requests, hit=hit, predicted=predicted)
    traffic.scrape(seconds=100)

    assert traffic.found() == []


@pytest.mark.parametrize(("others", "hit"), [(40, 99), (200, 30)])
def test_hits_that_may_all_be_those_of_other_pickers_prove_nothing(traffic: Traffic, others: int, hit: int) -> None:
    traffic.send(100)
    traffic.send(others, hit=hit, ours=False)
    traffic.scrape(seconds=30)

    assert traffic.found() == []


def test_one_of_several_pickers_notices_by_the_rate_of_hits(traffic: Traffic) -> None:
    traffic.send(100, hit=80)
    traffic.send(900, hit=80, ours=False)
    traffic.scrape(seconds=30)

    (finding,) = traffic.watch.findings.values()
    assert finding.message.startswith(f"{POD} probably found about 8000 tokens of our last 100 prompts in its cache, 0")


def test_requests_whose_prompt_is_not_known_do_not_count(traffic: Traffic) -> None:
    traffic.send(49, hit=80)
    for _ in range(100):
        traffic.watch.routed(POD, prompt_tokens=0, matched_tokens=0)
    traffic.scrape(seconds=100)

    assert traffic.found() == []


def test_a_restart_of_the_pod_heals_and_begins_anew(traffic: Traffic) -> None:
    traffic.send(50, hit=80)
    traffic.scrape(seconds=30)
    traffic.hits = traffic.queries = 0
    traffic.scrape()

    assert traffic.found() == []
    traffic.send(50, hit=80)
    traffic.scrape(seconds=30)
    assert traffic.found() == [NEVER_MATCHES]


def test_a_quiet_window_ends_after_ten_minutes_so_that_old_traffic_is_not_compared_with_new(traffic: Traffic) -> None:
    traffic.send(40, hit=80)
    traffic.scrape(seconds=600)
    traffic.send(20, hit=80)
    traffic.scrape(seconds=30)

    assert traffic.found() == []

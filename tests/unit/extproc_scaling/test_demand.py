"""Work from counters: what was computed, what waits more than before, what was refused."""

import pytest
from msgspec import structs

from extproc.scaling.capacity import Declared
from extproc.scaling.demand import RoleDemand, Waiting, Work, believed, is_sane
from extproc.scaling.seen import PodSeen
from kvmesh.pods.pod_report import EndpointLoad

REPORT = EndpointLoad(
    waiting_requests=0,
    running_requests=0,
    kv_usage=0.0,
    prefix_hit_tokens=0,
    prefix_query_tokens=0,
    reported_at=100.0,
)


def pod(load: EndpointLoad | None, *, address: str = "a:1", serves: bool = True) -> PodSeen:
    return PodSeen(
        address=address, role="both", serves=serves, load=load, tokens_per_second=1000.0, request_seconds=0.1
    )


def work(after: EndpointLoad, *, before: EndpointLoad = REPORT, waiting: Waiting | None = None, late: int = 0) -> Work:
    """Return what comes of two reports that are two seconds apart; `late` pods more have none."""
    demand = RoleDemand()
    others = [pod(None, address=f"late:{number}") for number in range(late)]
    assert demand.look([pod(before), *others], Waiting(), seconds=0.0, inter_token_seconds=None) is None
    found = demand.look(
        [pod(structs.replace(after, reported_at=102.0)), *others],
        waiting or Waiting(),
        seconds=2.0,
        inter_token_seconds=None,
    )
    assert found is not None
    return found


def test_cached_and_fetched_tokens_are_no_work() -> None:
    found = work(structs.replace(REPORT, prefix_query_tokens=5000, prefix_hit_tokens=1000, fetched_tokens=2000))
    assert (found.prefill, found.uncached_rate, found.cached_rate) == (1.0, 1000.0, 1500.0)


def test_a_pod_that_keeps_no_prefixes_is_known_by_what_has_ended() -> None:
    assert work(structs.replace(REPORT, prefill_computed_tokens=2000)).prefill == 1.0


def test_answers_of_queued_requests_count_with_their_expected_length() -> None:
    answers = structs.replace(REPORT, first_token_count=10, inter_token_count=1000)  # 100 tokens each
    seconds = Declared(decode=100.0)

    def decode(waiting: Waiting) -> float | None:
        demand = RoleDemand()
        demand.look([pod(REPORT)], Waiting(requests=3), seconds=0.0, inter_token_seconds=None, declared=seconds)
        after = [pod(structs.replace(answers, reported_at=102.0))]
        found = demand.look(after, waiting, seconds=2.0, inter_token_seconds=None, declared=seconds)
        return None if found is None else found.decode

    assert decode(Waiting(requests=3)) == 5.0
    assert decode(Waiting(requests=5)) == 6.0  # two more of 100 tokens
    assert decode(Waiting(requests=5, foreseen_requests=2, answer_tokens=600)) == 8.0
    assert decode(Waiting(requests=5, foreseen_requests=2, answer_tokens=1e9)) == 9.0  # four times the mean each
    assert decode(Waiting(requests=5, foreseen_requests=2, answer_tokens=0)) == 5.0


def test_a_pod_whose_report_is_late_is_taken_to_do_as_much() -> None:
    assert work(structs.replace(REPORT, prefix_query_tokens=2000), late=1).prefill == 2.0


def test_a_cordoned_pod_s_rest_counts_as_any_other_work() -> None:
    demand = RoleDemand()
    demand.look([pod(REPORT), pod(REPORT, address="b:1")], Waiting(), seconds=0.0, inter_token_seconds=None)
    after = structs.replace(REPORT, prefix_query_tokens=2000, reported_at=102.0)
    pods = [pod(after), pod(after, address="b:1", serves=False)]
    found = demand.look(pods, Waiting(), seconds=2.0, inter_token_seconds=None)
    assert found is not None
    assert found.prefill == 2.0


def test_requests_that_wait_at_pods_count_with_their_average_prompt() -> None:
    after = structs.replace(REPORT, prefix_query_tokens=2000, first_token_count=4, waiting_requests=2)
    found = work(after)
    assert found.backlog_tokens == 1000.0
    assert found.prefill == pytest.approx((2000 + 1000) / 2 / 1000)


@pytest.mark.parametrize(
    ("waits", "booked", "counted"),
    [
        ([900_000, 0, 0], {"a:1": 2}, [16, 0, 0]),  # a lie
        ([900_000], {}, [16]),
        ([30, 0, 0], {"a:1": 40}, [30, 0, 0]),  # what the pickers have sent there
        ([90, 100, 80], {}, [90, 100, 80]),  # requests that pass by the pickers
        ([10**9, 0, 0], {}, [10**9, 0, 0]),  # left to `is_sane`
    ],
)
def test_a_pod_s_waiting_requests_are_believed_as_far_as_they_can_be(
    waits: list[int], booked: dict[str, int], counted: list[int]
) -> None:
    pods = [
        pod(structs.replace(REPORT, waiting_requests=count), address=f"{'abc'[i]}:1") for i, count in enumerate(waits)
    ]
    found = believed([*pods, pod(None, address="silent:1")], booked)
    assert [each.load.waiting_requests for each in found if each.load is not None] == counted


def test_what_is_refused_counts_at_most_as_what_was_served() -> None:
    after = structs.replace(REPORT, prefix_query_tokens=2000)
    assert work(after, waiting=Waiting(refused_tokens=500.0)).prefill == 1.25
    assert work(after, waiting=Waiting(refused_tokens=1e9)).prefill == 2.0


def test_a_queue_that_drains_is_no_new_work() -> None:
    demand = RoleDemand()
    demand.look([pod(REPORT)], Waiting(tokens=4000.0), seconds=0.0, inter_token_seconds=None)
    after = structs.replace(REPORT, prefix_query_tokens=2000, reported_at=102.0)
    found = demand.look([pod(after)], Waiting(tokens=2000.0), seconds=2.0, inter_token_seconds=None)
    assert found is not None
    assert found.prefill == 0.0


def test_streams_are_bounded_by_what_the_cache_holds() -> None:
    after = structs.replace(REPORT, running_requests=10, kv_usage=0.45, first_token_count=4, inter_token_count=100)
    found = work(after)
    assert found.streams == pytest.approx(20.0)
    assert found.limit == "cache"
    assert found.decode == pytest.approx(0.5)  # nothing is known of the inter-token time: streams over streams
    assert found.output_rate == 50.0


def test_without_any_bound_decoding_says_nothing() -> None:
    assert work(structs.replace(REPORT, prefix_query_tokens=2000)).decode is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_what_cannot_be_is_nonsense(value: float) -> None:
    assert is_sane(REPORT)
    assert not is_sane(structs.replace(REPORT, kv_usage=value))
    assert not is_sane(structs.replace(REPORT, inter_token_seconds_sum=value))

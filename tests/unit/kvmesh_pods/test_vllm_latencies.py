"""The pods' latency histograms are read from their pages; what is not whole is left out."""

from math import inf

import pytest

from kvmesh.pods.engine_metrics import parse_latencies
from kvmesh.pods.metrics_page import MOST_BUCKETS
from kvmesh.pods.page_steps import at_once
from kvmesh.pods.pod_report import PodHistogram

TTFT, INTER_TOKEN = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"


def page(
    name: str = TTFT, *, labels: str = 'engine="0",model_name="tiny"', counts: str = "1 3 4", seconds: float = 2.5
) -> str:
    lines = [
        f'{name}_bucket{{{labels},le="{bound}"}} {count}'
        for bound, count in zip(("0.1", "1.0", "+Inf"), counts.split(), strict=True)
    ]
    return "\n".join(
        [f"# TYPE {name} histogram", *lines, f"{name}_count{{{labels}}} 4.0", f"{name}_sum{{{labels}}} {seconds}", ""]
    )


def read(*pages: str) -> tuple[object, object]:
    return at_once(parse_latencies("".join(pages).encode()))


FOUND = PodHistogram(bounds=(0.1, 1.0, inf), counts=(1.0, 3.0, 4.0), seconds=2.5)


def test_both_histograms_are_read_by_model() -> None:
    assert read(page(), page(INTER_TOKEN, counts="0 0 9", seconds=90.0)) == (
        {"tiny": FOUND},
        {"tiny": PodHistogram(bounds=(0.1, 1.0, inf), counts=(0.0, 0.0, 9.0), seconds=90.0)},
    )


def test_engines_of_a_pod_are_added_up_and_models_are_not() -> None:
    second = page(labels='engine="1",model_name="tiny"')
    other = page(labels='engine="0",model_name="big"')
    ttft, _ = read(page(), second, other)
    assert ttft == {
        "tiny": PodHistogram(bounds=(0.1, 1.0, inf), counts=(2.0, 6.0, 8.0), seconds=5.0),
        "big": FOUND,
    }


def test_the_older_name_of_the_inter_token_time_is_read_where_the_newer_one_is_missing() -> None:
    _, inter_token = read(page("vllm:time_per_output_token_seconds"))
    assert inter_token == {"tiny": FOUND}


def test_a_name_with_quotes_and_braces_is_what_it_means() -> None:
    ttft, _ = read(page(labels=r'engine="0",model_name="a\"b\\c}\nd"'))
    assert ttft == {'a"b\\c}\nd': FOUND}


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "<html>not found</html>",
        page(counts="3 1 4"),  # no histogram: it falls
        page().replace('le="+Inf"', 'le="2"'),  # without an end
        page().replace('le="+Inf"', 'le="nan"'),
        page().replace("_sum{", "_summ{"),
        page(counts="1 3 lots"),
        page(counts="1 3 NaN"),
    ],
    ids=["empty", "html", "falls", "no-end", "nan-bound", "no-sum", "no-number", "nan"],
)
def test_what_is_no_histogram_is_left_out(broken: str) -> None:
    assert read(broken) == ({}, {})


def test_a_page_of_endless_buckets_is_read_as_far_as_the_bound() -> None:
    lines = [f'{TTFT}_bucket{{le="{i}",model_name="m"}} 1' for i in range(10 * MOST_BUCKETS)]
    assert read("\n".join([*lines, f'{TTFT}_sum{{model_name="m"}} 1', ""])) == ({}, {})

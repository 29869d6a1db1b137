"""Pods with several data-parallel ranks behind one port: their names, their pages, the header with the rank."""

import json
from dataclasses import dataclass

import pytest

from extproc.pods.pod_ranks import RANK_HEADER, at_rank, one_a_pod, page_of, pinned, pod_of, rank_of, ranks_on
from extproc.pods.scrape_target import reads_header
from kvmesh.pods.http_response import HttpResponse

PAGE = b"""# HELP vllm:num_requests_running in batches
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="4",model_name="m"} 1.0
vllm:num_requests_running{engine="5",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="4",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="5",model_name="m"} 0.5
vllm:request_success_total{engine="5",finished_reason="stop",model_name="m"} 3.0
process_start_time_seconds 1.0
"""
SGLANG = b"""
sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 1.0
sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 1.0
sglang:num_running_reqs{dp_rank="1",tp_rank="0"} 1.0
"""
TENSOR_PARALLEL = b"""
sglang:num_running_reqs{tp_rank="0"} 1.0
sglang:num_running_reqs{tp_rank="1"} 1.0
"""


def test_an_endpoint_names_its_pod_and_its_rank() -> None:
    assert (pod_of("[::1]:8000#3"), rank_of("[::1]:8000#3"), at_rank("a:1", 0)) == ("[::1]:8000", 3, "a:1#0")
    assert (pod_of("a:1"), rank_of("a:1")) == ("a:1", None)


@pytest.mark.parametrize(
    ("page", "ranks"),
    [(PAGE, (4, 5)), (SGLANG, (0, 1)), (TENSOR_PARALLEL, ()), (page_of(PAGE, 4), ()), (b"", ())],
)
def test_a_page_tells_the_ranks_of_its_pod(page: bytes, ranks: tuple[int, ...]) -> None:
    assert ranks_on(page) == ranks


def test_a_ranks_page_has_its_own_series_and_those_of_the_process() -> None:
    assert page_of(PAGE, 5).decode().splitlines() == [
        "# HELP vllm:num_requests_running in batches",
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="5",model_name="m"} 2.0',
        'vllm:kv_cache_usage_perc{engine="5",model_name="m"} 0.5',
        'vllm:request_success_total{engine="5",finished_reason="stop",model_name="m"} 3.0',
        "process_start_time_seconds 1.0",
    ]
    assert b'engine="4"' not in page_of(PAGE.replace(b'"5"', b'"45"'), 45)


@dataclass
class Pod:
    pages: dict[str, str]  # path -> version

    async def get(self, path: str, *, max_body_bytes: int) -> HttpResponse:
        version = self.pages.get(path)
        body = json.dumps({"other": 1, "version": version}).encode()
        return HttpResponse(status=200 if version else 404, body=body if version else b"{}", keep_alive=True)


@pytest.mark.parametrize(
    ("pages", "reads"),
    [
        ({"/version": "0.32.0"}, True),
        ({"/version": "0.18.0rc1"}, True),
        ({"/version": "0.10.2"}, False),
        ({"/version": "1.0.0"}, True),
        ({"/version": "dev"}, False),
        ({"/server_info": "0.5.23"}, True),
        ({"/server_info": "0.5.4.post1"}, False),
        ({}, False),
    ],
)
async def test_the_version_tells_whether_the_header_is_read(pages: dict[str, str], reads: bool) -> None:
    assert await reads_header(Pod(pages)) is reads  # type: ignore[arg-type]


def test_a_request_goes_to_ranks_at_the_same_place_only() -> None:
    ranks = {"a:1": (4, 5), "b:1": (0, 1), "c:1": (0, 1, 2)}
    kept, headers = pinned(("a:1#5", "b:1#0", "d:1", "a:1#4", "c:1#1"), ranks)
    assert (kept, headers) == (["a:1#5", "b:1#1", "c:1#1", "a:1#5", "b:1#1"], {RANK_HEADER: "1"})
    assert pinned(("c:1#2", "a:1#4"), ranks) == (["c:1#2", "c:1#2"], {RANK_HEADER: "2"})
    assert pinned(("d:1", "a:1#4"), ranks) == (("d:1", "a:1#4"), {})
    assert pinned(("a:1#3",), {}) == (["a:1#3"], {RANK_HEADER: "3"})  # just found


def test_fallbacks_are_other_pods() -> None:
    assert one_a_pod(["a:1#1", "a:1#0", "b:1#0", "c:1"], most=2) == ["a:1#1", "b:1#0"]

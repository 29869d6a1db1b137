"""Bad pods: whatever way they fail, they are left out after a few requests, and come back when they are well."""

from pathlib import Path

import pytest

from tests.reports.failing_pods import (
    Pod,
    Way,
    all_serve,
    break_off,
    break_off_late,
    fail,
    failures_of_a_load,
    hang,
    hang_behind_headers,
    mesh_of,
    refuse,
    refuse_in_plain_text,
    reset,
    speak_tls,
    stream_an_error,
    well,
)

MOST_FAILURES = 20  # 73 if the idlest pod is the best; 25 is its share; 4 to 16 here
BAD = [
    *(refuse, refuse_in_plain_text, fail, reset, speak_tls, break_off, break_off_late),
    *(stream_an_error, hang, hang_behind_headers),
]
JUDGED_BY_NUMBERS = (break_off, break_off_late, hang, hang_behind_headers)  # of the pod's page


@pytest.mark.parametrize(
    ("way", "counts"),
    [(way, True) for way in BAD] + [(way, False) for way in JUDGED_BY_NUMBERS],
    ids=lambda value: value.__name__ if callable(value) else "numbers" if value else "no numbers",
)
async def test_a_bad_pod_is_left_out_after_a_few_requests_and_comes_back(
    tmp_path: Path, way: Way, counts: bool
) -> None:
    pods = [Pod(counts=counts) for _ in range(4)]
    async with mesh_of(tmp_path, pods) as mesh:
        await all_serve(mesh, pods)
        pods[1].way = way
        assert await failures_of_a_load(mesh) <= MOST_FAILURES
        pods[1].way = well
        await all_serve(mesh, pods)

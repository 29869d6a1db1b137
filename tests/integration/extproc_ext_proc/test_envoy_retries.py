"""What a real Envoy makes of the picker's word that a request is not to be repeated, as its filter's rules have it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from extproc.disaggregation.transfer_protocols import NO_RETRIES
from operate.local.envoy_config import named
from tests.integration.scripted_picker import BOTH, Mesh, mesh

RETRIES_503 = {
    "retry_on": "connect-failure,refused-stream,retriable-status-codes",
    "retriable_status_codes": [503],
    "num_retries": 2,
}
ALLOWED = {"allow_envoy": True}


async def full(_: web.Request, __: bytes) -> web.StreamResponse:
    return web.Response(status=503)


def edited(retries: dict[str, Any] | None, rules: dict[str, Any] | None) -> Callable[[dict[str, Any]], None]:
    """Return what gives the route these retries (None: the file's), and the filter these rules for headers."""

    def edit(manager: dict[str, Any]) -> None:
        [route] = manager["route_config"]["virtual_hosts"][0]["routes"]
        route["route"]["retry_policy"] = retries or route["route"]["retry_policy"]
        if rules is not None:
            picking = named(manager["http_filters"], "envoy.filters.http.ext_proc.kvmesh")
            picking["typed_config"]["mutation_rules"] = rules

    return edit


async def status_of(running: Mesh) -> int:
    running.books.set_headers = NO_RETRIES
    async with running.post() as response:
        return response.status


@pytest.mark.parametrize("file", BOTH)
@pytest.mark.parametrize(
    ("rules", "tried"),
    [
        (ALLOWED, 1),
        (None, 2),  # Envoy ignores what it does not allow
        ({"disallow_is_error": True}, 0),  # or ends the request: the doctor finds it
    ],
)
async def test_a_route_that_retries_503_obeys_where_the_filter_may_say_so(
    file: str, rules: dict[str, Any] | None, tried: int, tmp_path: Path
) -> None:
    async with mesh(file, tmp_path, full, edit=edited(RETRIES_503, rules)) as running:
        running.books.endpoints = (running.pod, running.other_pod, running.dead_pod)
        assert await status_of(running) == 503
        assert len(running.received) == tried
        assert not any(name.startswith("x-envoy-") for headers, _ in running.received for name in headers)


@pytest.mark.parametrize("file", BOTH)
@pytest.mark.parametrize(("rules", "tried"), [(ALLOWED, 0), (None, 1)])
async def test_the_files_own_retries_go_past_a_pod_that_is_gone_since_their_filter_ignores_it(
    file: str, rules: dict[str, Any] | None, tried: int, tmp_path: Path
) -> None:
    async with mesh(file, tmp_path, full, edit=edited(None, rules)) as running:
        running.books.endpoints = (running.dead_pod, running.pod, running.other_pod)
        assert await status_of(running) == 503
        assert len(running.received) == tried

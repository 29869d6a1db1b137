"""What `kvmesh install` renders, on a configuration like istiod's, in a real Envoy, before a scripted picker.

For every release and mode: istiod takes it and every patch finds its place; Envoy takes the result; picks are obeyed,
refusals pass, other services never meet the picker. `tests/e2e/test_install_traffic.py` has a real picker and pods.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.install.envoy_filters import UNPICKED_FILTER
from extproc.install.plan import FailureMode, Mode
from extproc.policy.values import Steering
from tests.integration.envoy_process import free_addresses
from tests.integration.extproc_ext_proc.test_envoy_steering import Refusal, ScriptedPicker, Seen, pod, start_picker
from tests.istiod.apply import HCM, Applied, apply_envoy_filters
from tests.istiod.base import DENIED_PATH
from tests.istiod.bootstrap import bootstrap, refusal_of, running_proxy
from tests.istiod.envoy_api import to_json
from tests.istiod.filters import documents_of
from tests.istiod.installs import INSTALLATIONS, PICKER, PODS, SHOP, Installation
from tests.istiod.releases import RELEASES

PICK_HEADER = "x-gateway-destination-endpoint"
CLIENT_MAY_NOT_SEND = (PICK_HEADER, f"{PICK_HEADER}-subset", f"{PICK_HEADER}-served")
PICK_FILTER = "envoy.filters.http.ext_proc.kvmesh"
MIB = 1 << 20
DEADLINE_SECONDS = 30.0
BY_NAME = {str(each): each for each in INSTALLATIONS}
GATEWAYS = [name for name, each in BY_NAME.items() if each.mode is not Mode.SIDECAR]
STATUS_ON_ERROR_FROM = 28  # below, Envoy says 500 for a picker that is gone


@cache
def applied(name: str) -> Applied:
    return BY_NAME[name].applied()


def listener(name: str, part: str) -> dict[str, Any]:
    [found] = [each for each in applied(name).proxy.listeners if each.name == part]
    return to_json(found)


def cluster(name: str, part: str) -> dict[str, Any]:
    [found] = [each for each in applied(name).proxy.clusters if each.name == part]
    return to_json(found)


def filters_of(chain: Mapping[str, Any]) -> list[str]:
    [manager] = [each["typed_config"] for each in chain["filters"] if each["name"] == HCM]
    return [each["name"] for each in manager["http_filters"]]


def last_filters(installation: Installation) -> list[str]:
    """The pick's filter and what stands behind it."""
    refusing = [UNPICKED_FILTER] if installation.is_buffered else []
    return [PICK_FILTER, *refusing, "envoy.filters.http.router"]


# --- what istiod and Envoy say ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
def test_istiod_takes_every_patch_and_each_finds_its_place(name: str) -> None:
    assert applied(name).outcomes
    assert applied(name).unmatched() == []


@pytest.mark.parametrize("name", list(BY_NAME))
def test_nothing_is_rendered_that_the_release_would_drop_in_silence(name: str) -> None:
    assert applied(name).dropped() == {}


@pytest.mark.parametrize("name", BY_NAME)
async def test_a_real_envoy_takes_the_patched_configuration(name: str, tmp_path: Path) -> None:
    config = bootstrap(applied(name).proxy, endpoints={PODS.cluster: ["127.0.0.1:1"], PICKER.cluster: ["127.0.0.1:2"]})

    assert await refusal_of(config, tmp_path) is None


@pytest.mark.parametrize("name", BY_NAME)
def test_the_pick_comes_last_after_everything_that_may_refuse(name: str) -> None:
    [chain] = listener(name, BY_NAME[name].entry)["filter_chains"]
    filters = filters_of(chain)

    last = last_filters(BY_NAME[name])
    assert filters[-len(last) :] == last
    assert filters.count(PICK_FILTER) == 1


@pytest.mark.parametrize("name", BY_NAME)
def test_the_pick_is_read_from_metadata_alone_which_no_client_can_write(name: str) -> None:
    found = cluster(name, PODS.cluster)
    key = {"key": "envoy.lb", "path": [{"key": PICK_HEADER}]}

    if BY_NAME[name].steering is Steering.ORIGINAL_DST:
        assert found["original_dst_lb_config"] == {"metadata_key": key}
    else:
        [policy] = found["load_balancing_policy"]["policies"]
        config = policy["typed_extension_config"]["typed_config"]
        assert config["override_host_sources"] == [{"metadata": key}]


@pytest.mark.parametrize("name", BY_NAME)
def test_filters_of_others_that_go_before_the_router_go_before_the_pick_as_well(name: str) -> None:
    shape, base = BY_NAME[name], BY_NAME[name].base()
    router = {"name": HCM, "subFilter": {"name": "envoy.filters.http.router"}}
    lua = {"@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"}
    foreign = {
        "apiVersion": "networking.istio.io/v1alpha3",
        "kind": "EnvoyFilter",
        "metadata": {"name": "zzz", "namespace": base.namespace},
        "spec": {
            "configPatches": [
                {
                    "applyTo": "HTTP_FILTER",
                    "match": {"listener": {"name": shape.entry, "filterChain": {"filter": router}}},
                    "patch": {"operation": "INSERT_BEFORE", "value": {"name": "foreign", "typed_config": lua}},
                }
            ]
        },
    }
    documents = [foreign, *documents_of(shape.documents(), "EnvoyFilter")]

    both = apply_envoy_filters(base, documents, release=RELEASES[f"1.{shape.minor}"])

    [entry] = [to_json(each) for each in both.proxy.listeners if each.name == shape.entry]
    last = ["foreign", *last_filters(shape)]
    assert filters_of(entry["filter_chains"][0])[-len(last) :] == last


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in GATEWAYS])
def test_what_comes_in_to_a_client_is_left_alone(name: str) -> None:
    assert listener(name, "virtualInbound") == to_json(
        next(each for each in BY_NAME[name].base().listeners if each.name == "virtualInbound")
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_clusters_of_other_services_are_left_alone_and_mutual_tls_stays_as_it_was(name: str) -> None:
    before = {each.name: to_json(each) for each in BY_NAME[name].base().clusters}
    after = {each.name: to_json(each) for each in applied(name).proxy.clusters}
    tls = ("transport_socket", "transport_socket_matches")

    assert {part for part in before if before[part] != after[part]} == {PODS.cluster, PICKER.cluster}
    assert {key: before[PICKER.cluster].get(key) for key in tls} == {key: after[PICKER.cluster].get(key) for key in tls}
    assert {key: before[PODS.cluster].get(key) for key in tls} == {key: after[PODS.cluster].get(key) for key in tls}
    assert any(key in after[PODS.cluster] for key in tls)


@pytest.mark.parametrize("name", list(BY_NAME))
@pytest.mark.parametrize("proxies", [24, 25, 26, 27, 28])
def test_proxies_that_were_not_upgraded_yet_get_the_whole_installation_or_nothing_of_it(
    name: str, proxies: int
) -> None:
    istiod = RELEASES[f"1.{BY_NAME[name].minor}"]
    old = replace(BY_NAME[name].base(), version=RELEASES[f"1.{proxies}"].proxy_version)

    patched = apply_envoy_filters(old, documents_of(BY_NAME[name].documents(), "EnvoyFilter"), release=istiod)

    assert len({bool(each.where) for each in patched.outcomes}) == 1


# --- traffic ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A proxy with an installation on it, before a scripted picker and pods that say who they are."""

    installation: Installation
    url: str
    picker: ScriptedPicker
    pods: tuple[str, ...]
    dead_pod: str
    shop: str
    session: aiohttp.ClientSession

    async def post(
        self,
        body: bytes = b"{}",
        *,
        path: str = "/v1/completions",
        host: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Send a request; return status, body and headers of the answer."""
        sent = {"Host": host or self.installation.host, **(headers or {})}
        async with self.session.post(f"{self.url}{path}", data=body, headers=sent) as response:
            return response.status, await response.read(), response.headers


@asynccontextmanager
async def mesh(installation: Installation, folder: Path, *, has_picker: bool = True) -> AsyncIterator[Mesh]:
    picker = ScriptedPicker()
    async with AsyncExitStack() as stack:
        picker_port, stop_picker = start_picker(picker)
        stack.callback(stop_picker)
        live = [await stack.enter_async_context(pod()) for _ in range(3)]
        used = [picker_port, *(each.port for each in live)]
        dead, nobody = free_addresses(2, avoid=used)
        proxy = await stack.enter_async_context(
            running_proxy(
                installation.applied().proxy,
                folder,
                endpoints={
                    PODS.cluster: [str(each) for each in (dead, *live[:2])],
                    SHOP.cluster: [str(live[2])],
                    PICKER.cluster: [f"127.0.0.1:{picker_port}" if has_picker else str(nobody)],
                },
                avoid=[*used, dead.port, nobody.port],
            )
        )
        timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        yield Mesh(
            installation=installation,
            url=proxy.listeners[installation.entry],
            picker=picker,
            pods=tuple(map(str, live[:2])),
            dead_pod=str(dead),
            shop=str(live[2]),
            session=session,
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BY_NAME)
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with mesh(BY_NAME[request.param], tmp_path_factory.mktemp("proxy")) as started:
        yield started


async def until_ended(exchange: Seen) -> None:
    assert await asyncio.to_thread(exchange.ended.wait, DEADLINE_SECONDS)


def facts(body: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(body)
    return parsed


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_goes_to_the_pod_that_is_picked_with_its_body_unchanged(running: Mesh) -> None:
    body = os.urandom(300_000)
    for chosen in (*running.pods, *reversed(running.pods)):
        running.picker.answer = chosen

        status, content, headers = await running.post(body)

        assert (status, headers["x-kvmesh-upstream"]) == (200, chosen)
        assert facts(content) == {"pod": chosen, "bytes": len(body), "pick": chosen}
        await until_ended(running.picker.exchanges[-1])
        assert running.picker.exchanges[-1].served == chosen


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_client_says_about_endpoints_reaches_neither_the_picker_nor_the_pod(running: Mesh) -> None:
    mine, other = running.pods
    running.picker.answer = mine

    status, content, _ = await running.post(headers=dict.fromkeys(CLIENT_MAY_NOT_SEND, other))

    assert (status, facts(content)["pod"], facts(content)["pick"]) == (200, mine, mine)
    assert not set(CLIENT_MAY_NOT_SEND) & set(running.picker.exchanges[-1].headers)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_dead_pod_costs_a_retry_where_the_picker_may_name_several_and_a_503_where_it_names_one(
    running: Mesh,
) -> None:
    if running.installation.steering is Steering.ORIGINAL_DST:
        running.picker.answer = running.dead_pod
        status, _, _ = await running.post()
        assert status == 503
        return
    for second, third in (running.pods, tuple(reversed(running.pods))):
        running.picker.answer = f"{running.dead_pod},{second},{third}"

        status, content, _ = await running.post(b"x" * 2 * MIB)

        assert (status, facts(content)["pod"], facts(content)["bytes"]) == (200, second, 2 * MIB)
        await until_ended(running.picker.exchanges[-1])
        assert running.picker.exchanges[-1].served == second


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("status", [413, 503])
async def test_a_refusal_reaches_the_client_as_it_is(running: Mesh, status: int) -> None:
    running.picker.answer = Refusal(status=status, body=b'{"error": {}}')

    got, content, headers = await running.post()

    assert (got, content, headers["content-type"]) == (status, b'{"error": {}}', "application/json")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_over_16_mib_is_refused_by_the_picker_in_its_own_words(running: Mesh) -> None:
    running.picker.answer = Refusal(status=413, body=b'{"error": {}}', above_bytes=16 * MIB)

    status, content, _ = await running.post(bytes(17 * MIB))

    assert (status, content) == (413, b'{"error": {}}')
    assert running.picker.exchanges[-1].body_bytes > 16 * MIB


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_of_15_mib_arrives(running: Mesh) -> None:
    running.picker.answer = running.pods[0]

    status, content, _ = await running.post(bytes(15 * MIB))

    assert (status, facts(content)["bytes"]) == (200, 15 * MIB)


@pytest.mark.asyncio(loop_scope="module")
async def test_other_services_never_meet_the_picker(running: Mesh) -> None:
    running.picker.answer = Refusal(status=503, body=b"{}")
    before = len(running.picker.exchanges)

    status, content, _ = await running.post(host=running.installation.other_host)

    assert (status, facts(content)["pod"]) == (200, running.shop)
    assert len(running.picker.exchanges) == before


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_is_picked_for_what_the_gateway_denies(running: Mesh) -> None:
    if running.installation.mode is Mode.SIDECAR:
        pytest.skip("a sidecar judges what comes in, not what goes out")
    before = len(running.picker.exchanges)

    status, _, _ = await running.post(path=DENIED_PATH)

    assert status == 403
    # Envoy shows the filter its own answers, too: a stream without a request
    assert [seen.headers for seen in running.picker.exchanges[before:] if seen.headers] == []


@pytest.mark.asyncio(loop_scope="module")
async def test_the_stream_to_the_picker_ends_when_the_client_vanishes_and_not_before(running: Mesh) -> None:
    running.picker.answer = running.pods[0]
    url, headers = f"{running.url}/slow", {"Host": running.installation.host}
    async with running.session.post(url, data=b"{}", headers=headers) as response:
        assert await response.content.readexactly(5) == b"begun"
        exchange = running.picker.exchanges[-1]
        assert (await running.post())[0] == 200  # a whole exchange: time enough for a stream that ends too early
        await until_ended(running.picker.exchanges[-1])
        assert not exchange.ended.is_set()
        response.close()
        await until_ended(exchange)


@pytest.mark.parametrize("name", BY_NAME)
async def test_without_a_picker_requests_are_refused_where_it_fails_closed(name: str, tmp_path: Path) -> None:
    installation = BY_NAME[name]
    async with mesh(installation, tmp_path, has_picker=False) as running:
        status, _, _ = await running.post()

        refused_by_us = installation.is_buffered or installation.minor >= STATUS_ON_ERROR_FROM
        assert status == (503 if refused_by_us else 500)
        assert (await running.post(host=installation.other_host))[0] == 200


@pytest.mark.parametrize("name", [name for name, each in BY_NAME.items() if each.steering is Steering.OVERRIDE_HOST])
async def test_without_a_picker_any_pod_serves_where_it_fails_open(name: str, tmp_path: Path) -> None:
    installation = replace(BY_NAME[name], failure_mode=FailureMode.FAIL_OPEN)
    async with mesh(installation, tmp_path, has_picker=False) as running:
        answers = [await running.post(b"x" * 2 * MIB) for _ in range(3)]

    assert {status for status, _, _ in answers} == {200}
    assert {facts(content)["pod"] for _, content, _ in answers} <= set(running.pods)

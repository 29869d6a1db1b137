"""Requests that wait at the picker, over real gRPC: in which order they go, who gives way, and how their wait ends."""

import asyncio

import pytest

from extproc.choosing.room import BLIND_REQUESTS
from extproc.ext_proc.exchange import BodyMode
from tests.integration.hermetic_envoy import Envoy, Refused, Routed
from tests.integration.overload_picker import Crowd, crowd_before, picker_before, policy
from tests.integration.overload_pods import HeldPod, held_pods

CLASSES = {
    "critical": {"queueSeconds": 60},
    "standard": {"queueSeconds": 60},
    "sheddable": {"queueSeconds": 60, "reservedShare": 0},
}


def full(pods: list[HeldPod]) -> None:
    for pod in pods:
        pod.fill()


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED], ids=["duplex", "buffered"])
async def test_a_request_waits_while_every_pod_is_full_and_goes_to_the_one_that_has_room_first(mode: BodyMode) -> None:
    async with held_pods(2) as pods, crowd_before(pods, envoy=Envoy(mode=mode, raw=True)) as crowd:
        full(pods)
        await crowd.saw(waiting=100)
        client = crowd.send()
        await crowd.waiting({"standard": 1})
        assert client.waits
        pods[1].free()
        assert await client.routed() == pods[1].address
        await client.answered()
        assert await crowd.picker.metric('kvmesh_queue_left_total{class="standard",outcome="dispatched"}') == 1


async def test_classes_go_by_priority_and_newcomers_overtake_nobody_of_their_class() -> None:
    priorities = policy(classes=CLASSES)
    async with held_pods(1) as pods, crowd_before(pods, policy=priorities) as crowd:
        full(pods)
        await crowd.saw(waiting=100)
        for number, name in enumerate(("sheddable", "standard", "critical", "sheddable", "standard", "critical"), 1):
            crowd.send(name, name=f"{name}-{number}", tenant="one")
            await crowd.waiting(number)
        pods[0].free()
        await crowd.waiting(0)
        assert await crowd.order() == [
            *("critical-3", "critical-6"),
            *("standard-2", "standard-5"),
            *("sheddable-1", "sheddable-4"),
        ]


async def test_within_a_tenant_the_shortest_goes_first_and_no_tenant_waits_for_all_of_another() -> None:
    async with held_pods(1) as pods, crowd_before(pods) as crowd:
        full(pods)
        await crowd.saw(waiting=100)
        for number, words in enumerate((3000, 1000, 2000), 1):  # more tokens than a tenant's turn
            crowd.send(tenant="flood", name=f"flood-{words}", words=words)
            await crowd.waiting(number)
        crowd.send(tenant="steady", name="steady-1000", words=1000)
        await crowd.waiting(4)
        pods[0].free()
        await crowd.waiting(0)
        order = await crowd.order()
        assert [name for name in order if name.startswith("flood")] == ["flood-1000", "flood-2000", "flood-3000"]
        assert order.index("steady-1000") < order.index("flood-2000")


async def test_a_completion_lets_the_next_one_go_without_any_report_of_a_pod() -> None:
    # nobody speaks again, so that bookings alone decide: 32, where the pod was not seen to run more
    priorities = policy(stale_after_seconds=0.3)
    async with held_pods(1) as pods, crowd_before(pods, policy=priorities, scrape_timeout_seconds=600.0) as crowd:
        pods[0].waiting, pods[0].running = 100, 1
        await crowd.saw(waiting=100)
        pods[0].is_mute = True
        await crowd.saw(waiting=None)
        open_ = [crowd.send("critical") for _ in range(int(BLIND_REQUESTS))]
        assert {await client.routed() for client in open_} == {pods[0].address}
        next_one = crowd.send("critical")
        await crowd.waiting(1)
        await open_[0].answered()
        assert await next_one.routed() == pods[0].address


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    async with held_pods(1) as pods, crowd_before(pods) as crowd:
        full(pods)
        await crowd.saw(waiting=100)
        clients = []
        for number in range(3):
            clients.append(crowd.send(name=f"{number}"))
            await crowd.waiting(number + 1)
        await clients[2].leave()  # the last one: nobody would try it before the others have gone
        await crowd.waiting(2)
        pods[0].free()
        assert {await clients[0].routed(), await clients[1].routed()} == {pods[0].address}
        assert await crowd.order() == ["0", "1"]
        assert await crowd.picker.metric('kvmesh_queue_left_total{class="standard",outcome="cancelled"}') == 1


async def test_whoever_may_not_be_refused_is_sent_on_when_its_time_is_over_or_no_place_is_left() -> None:
    classes = {"standard": {"queueSeconds": 0.2}, "critical": {"queueRequests": 0}}
    async with held_pods(1) as pods, crowd_before(pods, policy=policy(classes=classes)) as crowd:
        full(pods)
        await crowd.saw(waiting=100)
        assert isinstance(await crowd.send("critical").outcome(), Routed)  # none of its class waits
        assert await crowd.picker.metric('kvmesh_queue_left_total{class="critical",outcome="full"}') == 1
        assert isinstance(await crowd.send("standard").outcome(), Routed)
        assert await crowd.picker.metric('kvmesh_queue_left_total{class="standard",outcome="timeout"}') == 1
        assert await crowd.picker.metric("kvmesh_shed_requests_total") == 0


async def test_a_higher_priority_takes_the_place_of_the_newest_sheddable_one_of_the_tenant_with_most() -> None:
    priorities = policy(classes=CLASSES, overload={"queueRequests": 3})
    async with held_pods(1) as pods, crowd_before(pods, policy=priorities) as crowd:
        full(pods)
        await crowd.saw(waiting=100)
        one = [crowd.send("sheddable", tenant="steady")]
        await crowd.waiting(1)
        two = crowd.send("sheddable", tenant="flood")
        await crowd.waiting(2)
        three = crowd.send("sheddable", tenant="flood")
        await crowd.waiting(3)
        critical = crowd.send("critical")
        refusal = await three.refused()
        assert (refusal.status, refusal.reason, refusal.headers["x-kvmesh-priority"]) == (503, "displaced", "sheddable")
        assert refusal.retry_after is not None
        await crowd.waiting({"sheddable": 2, "critical": 1})
        newcomer = await crowd.send("sheddable", tenant="flood").refused()
        assert newcomer.reason == "queue-full"
        pods[0].free()
        assert {await client.routed() for client in (*one, two, critical)} == {pods[0].address}


async def test_a_request_for_one_full_pod_holds_up_nobody_who_may_go_to_another() -> None:
    async with held_pods(2) as pods, crowd_before(pods) as crowd:
        pods[0].fill()
        await crowd.picker.eventually("/state", lambda state: state["endpoints"][0]["waiting"] == 100)
        stuck = crowd.send("critical", subset=[pods[0].address])
        await crowd.waiting(1)
        assert await crowd.send("sheddable").routed() == pods[1].address
        assert stuck.waits


async def test_a_picker_that_stops_sends_the_sheddable_away_and_the_others_on() -> None:
    stop = asyncio.Event()
    async with held_pods(1) as pods, picker_before(pods, stop=stop) as picker:
        full(pods)
        crowd = Crowd(picker)
        await crowd.saw(waiting=100)
        sheddable, standard = crowd.send("sheddable"), crowd.send("standard")
        await crowd.waiting({"sheddable": 1, "standard": 1})
        stop.set()
        assert (await sheddable.refused()).reason == "picker-stopping"
        assert await standard.routed() == pods[0].address
        await standard.answered()


async def test_without_overload_control_everything_goes_at_once() -> None:
    async with held_pods(1) as pods, crowd_before(pods, policy=policy(overload={"enabled": False})) as crowd:
        full(pods)
        await crowd.saw(waiting=100)
        found = [await crowd.send(name).outcome() for name in ("sheddable", "standard", "critical")]
        assert not [each for each in found if isinstance(each, Refused)]

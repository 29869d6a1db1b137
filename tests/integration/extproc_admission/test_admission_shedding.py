"""What is refused, and what the client is told, over real gRPC: early rejection, Retry-After, quotas, degradation."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from extproc.admission import pressure_memory
from extproc.ext_proc.exchange import BodyMode
from tests.integration.hermetic_envoy import Envoy, Refused, Routed
from tests.integration.kv_redis import RedisServer
from tests.integration.overload_picker import Crowd, crowd_before, picker_before, policy
from tests.integration.overload_pods import held_pods

LONG = 2000  # words of a prompt, some thousands of tokens
NONE_WAITS: dict[str, Any] = {"classes": {"sheddable": {"queueRequests": 0}}}


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED], ids=["duplex", "buffered"])
async def test_whose_target_no_pod_can_meet_is_refused_with_all_that_a_client_needs(
    mode: BodyMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure_memory, "LEAST_RETRY_SECONDS", 3.0)
    monkeypatch.setattr(pressure_memory, "MOST_RETRY_SECONDS", 3.0)
    monkeypatch.setattr(pressure_memory, "RETRY_JITTER", 0.0)
    # 100 requests wait at the pod, which starts 20 a second
    priorities = policy(classes={"sheddable": {"ttftSeconds": 0.01}})
    envoy = Envoy(mode=mode, raw=True)
    async with held_pods(1) as pods, crowd_before(pods, envoy=envoy, policy=priorities) as crowd:
        pods[0].fill()
        await crowd.saw(waiting=100)
        refusal = await crowd.send("sheddable").refused()
        message = refusal.error["message"]
        assert refusal == Refused(
            status=503,
            reason="shed",
            content_type="application/json",
            error={"message": message, "type": "server_error", "param": None, "code": "overloaded"},
            retry_after="3",
            headers={"retry-after-ms": "3000", "x-kvmesh-priority": "sheddable"},
        )
        assert "'sheddable'" in message
        assert "0.01 s is what the class is promised" in message
        assert "try again in 3 s" in message
        assert await crowd.picker.metric('kvmesh_shed_requests_total{class="sheddable",reason="shed"}') == 1
        others = [crowd.send("standard"), crowd.send("critical")]  # wait, and are not refused
        await crowd.waiting({"standard": 1, "critical": 1})
        pods[0].free()
        assert [await client.routed() for client in others] == [pods[0].address] * 2


async def test_a_class_may_be_refused_with_429() -> None:
    priorities = policy(classes={"sheddable": {"queueRequests": 0, "refusalStatus": 429}})
    async with held_pods(1) as pods, crowd_before(pods, policy=priorities) as crowd:
        pods[0].fill()
        await crowd.saw(waiting=100)
        refusal = await crowd.send("sheddable").refused()
        assert (refusal.status, refusal.reason) == (429, "queue-full")


async def test_whoever_has_waited_for_as_long_as_its_class_may_is_refused() -> None:
    priorities = policy(classes={"sheddable": {"queueSeconds": 0.2}})
    async with held_pods(1) as pods, crowd_before(pods, policy=priorities) as crowd:
        pods[0].fill()
        await crowd.saw(waiting=100)
        refusal = await crowd.send("sheddable").refused()
        assert (refusal.status, refusal.reason) == (503, "queue-timeout")
        left = 'kvmesh_queue_left_total{class="sheddable",outcome="timeout"}'
        assert await crowd.picker.metric(left) == 1


async def test_those_who_are_refused_together_are_asked_back_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pressure_memory, "LEAST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(pressure_memory, "RETRY_JITTER", 0.0)
    async with held_pods(1) as pods, crowd_before(pods, policy=policy(**NONE_WAITS)) as crowd:
        pods[0].fill()
        await crowd.saw(waiting=100)
        times = []
        for _ in range(5):
            refusal = await crowd.send("sheddable", words=LONG).refused()
            times.append(int(refusal.headers["retry-after-ms"]))
        # each comes when the work of those before it is done; the pods' rate is not known: 8,000 tokens a second
        gaps = [after - before for before, after in pairwise(times)]
        assert min(gaps) > 100, times


async def test_a_pod_with_room_for_others_has_none_for_a_class_with_a_lower_ceiling() -> None:
    overload = {"waitingRequests": 80}
    priorities = policy(classes={"sheddable": {"queueRequests": 0, "ceiling": 0.01}}, overload=overload)
    async with held_pods(1) as pods, crowd_before(pods, policy=priorities) as crowd:
        pods[0].waiting, pods[0].running = 40, 4
        await crowd.saw(waiting=40)
        assert (await crowd.send("sheddable").refused()).reason == "queue-full"
        assert isinstance(await crowd.send("critical").outcome(), Routed)


# --- saturation that cannot jam, pods that say no ---------------------------------------------------------------------


async def test_pods_that_say_nothing_any_more_get_a_few_requests_each_and_the_pool_goes_on() -> None:
    priorities = policy(stale_after_seconds=0.3)
    async with held_pods(2) as pods, crowd_before(pods, policy=priorities, scrape_timeout_seconds=0.2) as crowd:
        pods[0].is_mute = True
        await crowd.picker.eventually("/state", lambda state: state["endpoints"][0]["waiting"] is None)
        pods[1].fill()
        await crowd.picker.eventually("/state", lambda state: state["endpoints"][1]["waiting"] == 100)
        clients = [crowd.send() for _ in range(2)]
        assert {await client.routed() for client in clients} == {pods[0].address}
        third = crowd.send()
        await crowd.waiting(1)
        assert third.waits  # two are open there, and nobody knows what that means
        pods[1].is_mute = True  # now nobody says anything: what is booked decides alone
        assert await third.routed() in {pod.address for pod in pods}


async def test_full_pods_stand_behind_those_with_room_for_the_case_that_these_do_not_answer() -> None:
    async with held_pods(3) as pods, crowd_before(pods) as crowd:
        pods[0].fill()
        pods[2].fill()
        pods[2].waiting = 50
        await crowd.picker.eventually(
            "/state", lambda state: [pod["waiting"] for pod in state["endpoints"]] == [100, 0, 50]
        )
        found = await crowd.send().outcome()
        assert isinstance(found, Routed)
        assert found.endpoints == (pods[1].address, pods[2].address, pods[0].address)


async def test_a_pod_that_answers_503_itself_counts_as_full_and_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.choosing.endpoint_health.FULL_SECONDS", 60.0)
    monkeypatch.setattr("extproc.choosing.endpoint_health.MOST_FULL_SECONDS", 60.0)
    async with held_pods(2) as pods, picker_before(pods, policy=policy()) as picker:
        async with Envoy(mode=BodyMode.FULL_DUPLEX_STREAMED, raw=True).exchange(picker.grpc_address) as exchange:
            found = await exchange.request(b'{"model":"tiny","prompt":"one"}')
            assert isinstance(found, Routed)
            await exchange.response(b"{}", status=503)
        refusing = found.endpoints[0]
        crowd = Crowd(picker)
        assert refusing not in {await crowd.send().routed() for _ in range(6)}
        state = await picker.get("/state")
        assert {pod["avoided"] for pod in state["endpoints"]} == {None}  # no failure
        assert await picker.metric(f'kvmesh_endpoint_full_answers_total{{endpoint="{refusing}"}}') == 1
        await crowd.go_home()


async def test_a_pod_that_has_just_come_gets_a_few_requests_at_first() -> None:
    priorities = policy(overload={"slowStartSeconds": 1000})
    async with held_pods(2) as pods:
        new = pods[1]
        await new.stop()
        async with crowd_before(pods, policy=priorities) as crowd:
            pods[0].running = 20
            await crowd.picker.eventually("/state", lambda state: state["endpoints"][0]["running"] == 20)
            await new.again()
            await crowd.picker.eventually("/state", lambda state: state["endpoints"][1]["state"] == "ready")
            went: list[str] = []
            async with asyncio.timeout(15):  # what pods usually run is known once a second
                while "it is new" not in (await crowd.explained(new.address)).get("filter", ""):
                    went.append(await crowd.send().routed())
                    await asyncio.sleep(0.02)  # a client of one connection has no more than 512 requests in flight
            assert new.address in went
            assert {await crowd.send().routed() for _ in range(4)} == {pods[0].address}


async def test_without_a_pod_that_lives_everybody_is_refused_and_nobody_waits() -> None:
    async with held_pods(1) as pods, crowd_before(pods) as crowd:
        await pods[0].stop()
        await crowd.picker.eventually("/state", lambda state: state["endpoints"][0]["state"] == "unreachable")
        for name in ("critical", "sheddable"):
            refusal = await crowd.send(name).refused()
            assert (refusal.status, refusal.reason) == (503, "no-ready-endpoint")


async def test_those_who_wait_for_a_pod_that_goes_away_are_told() -> None:
    async with held_pods(1) as pods, crowd_before(pods) as crowd:
        pods[0].fill()
        await crowd.saw(waiting=100)
        clients = [crowd.send("critical"), crowd.send("sheddable")]
        await crowd.waiting(2)
        await pods[0].stop()
        assert [(await client.refused()).reason for client in clients] == ["no-ready-endpoint"] * 2


# --- classes and degradation ------------------------------------------------------------------------------------------


async def test_the_class_comes_from_rules_claims_and_an_objective_that_is_trusted_as_far_as_the_policy_says() -> None:
    priorities = policy(
        trustObjective=False,
        objectives={"nightly": "sheddable"},
        tenants={"claim": "sub"},
        rules=[
            {"priorityClass": "critical", "claims": {"org.plan": "gold"}},
            {"priorityClass": "critical", "headers": {"x-internal": "*"}, "trustObjective": True},
            {"priorityClass": "sheddable", "models": ["slow"]},
        ],
    )
    async with held_pods(1, models=("tiny", "slow")) as pods, crowd_before(pods, policy=priorities) as crowd:
        requests: dict[str, dict[str, Any]] = {
            "plain": {},
            "promotion": {"objective": "critical"},
            "unknown": {"objective": "never-heard-of"},
            "lower": {"objective": "nightly"},
            "gold": {"claims": {"sub": "acme", "org": {"plan": "gold"}}, "tenant": "somebody else"},
            "internal": {"headers": {"x-internal": "yes"}, "objective": "standard"},
            "slow": {"model": "slow"},
        }
        for name, request in requests.items():
            await crowd.send(request.pop("objective", None), name=name, **request).routed()
        page = await crowd.picker.get("/v1/decisions?limit=200")
        found = {record["request_id"]: (record["request"]["class"], record["request"]["tenant"]) for record in page}
        assert found == {
            "plain": ("standard", ""),
            "promotion": ("standard", ""),
            "unknown": ("standard", ""),
            "lower": ("sheddable", ""),
            "gold": ("critical", "other"),  # no quota names it
            "internal": ("standard", ""),
            "slow": ("sheddable", ""),
        }
        assert await crowd.picker.metric('kvmesh_ignored_objectives_total{why="untrusted"}') == 1
        assert await crowd.picker.metric('kvmesh_ignored_objectives_total{why="unknown"}') == 1


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED], ids=["duplex", "buffered"])
async def test_under_pressure_answers_are_capped_long_prompts_refused_and_then_everything(mode: BodyMode) -> None:
    steps = [
        {"step": "cap-output", "tokens": 7, "enter": 1.0, "leave": 0.5, "leastSeconds": 0},
        {"step": "limit-prompt", "tokens": 50, "enter": 1.0, "leave": 0.5, "leastSeconds": 0},
    ]
    priorities = policy(classes={"standard": {"ttftSeconds": 0.01, "queueSeconds": 60, "degrade": steps}})
    envoy = Envoy(mode=mode, raw=True)
    async with held_pods(1) as pods, crowd_before(pods, envoy=envoy, policy=priorities) as crowd:
        before = await crowd.send().outcome()
        assert isinstance(before, Routed)
        assert json.loads(before.body)["max_tokens"] == 100
        pods[0].fill()
        await crowd.saw(waiting=100)
        crowd.send("critical")  # what shows how the pool stands
        await crowd.waiting(1)
        capped = crowd.send()
        await crowd.waiting(2)
        refusal = await crowd.send(words=LONG).refused()
        assert (refusal.status, refusal.reason) == (413, "prompt-limited")
        assert "may have 50 prompt tokens" in refusal.error["message"]
        assert await crowd.picker.metric('kvmesh_degradation_step{class="standard",step="cap-output"}') == 1
        pods[0].free()
        found = await capped.outcome()
        assert isinstance(found, Routed)
        assert json.loads(found.body)["max_tokens"] == 7
        after = await crowd.send().outcome()
        assert isinstance(after, Routed)
        assert json.loads(after.body)["max_tokens"] == 100
        assert await crowd.picker.metric('kvmesh_degradation_changes_total{change="left",class="standard"') == 2


async def test_the_step_reject_refuses_before_the_request_is_read() -> None:
    steps = [{"step": "reject", "enter": 1.0, "leave": 0.5}]
    priorities = policy(classes={"sheddable": {"ttftSeconds": 0.01, "degrade": steps}})
    async with held_pods(1) as pods, crowd_before(pods, policy=priorities) as crowd:
        pods[0].fill()
        await crowd.saw(waiting=100)
        crowd.send("critical")
        await crowd.waiting(1)
        refusal = await crowd.send("sheddable").refused()
        assert (refusal.status, refusal.reason, refusal.headers["x-kvmesh-priority"]) == (503, "shed", "sheddable")


async def test_pods_with_priority_scheduling_are_sent_the_class() -> None:
    async with held_pods(1) as pods, crowd_before(pods, policy=policy(enginePriority=True)) as crowd:
        sent = [await crowd.send(name).outcome() for name in ("critical", "standard", "sheddable")]
        bodies = [json.loads(found.body) for found in sent if isinstance(found, Routed)]
        assert [body.get("priority") for body in bodies] == [-100, None, 100]  # None: vLLM's own, 0


# --- quotas -----------------------------------------------------------------------------------------------------------


async def test_replicas_share_a_tenants_quota_and_a_refusal_says_when_it_is_over(redis_server: RedisServer) -> None:
    priorities = policy(quotas=[{"tenant": "acme", "requestsPerMinute": 12, "burstSeconds": 15}])
    changes: dict[str, Any] = {"policy": priorities, "redis_url": redis_server.url, "index_timeout_seconds": 5.0}
    async with (
        held_pods(1) as pods,
        crowd_before(pods, **changes) as one,
        crowd_before(pods, **changes) as other,
    ):
        for crowd in (one, other, one):
            await crowd.send(tenant="acme").routed()
        refusal = await other.send(tenant="acme").refused()
        assert (refusal.status, refusal.reason, refusal.error["code"]) == (429, "quota-exceeded", "rate_limit_exceeded")
        assert (refusal.error["type"], refusal.headers["x-ratelimit-limit-requests"]) == ("requests", "12")
        assert 1 <= int(refusal.retry_after or 0) <= 5
        await other.send(tenant="somebody else").routed()
        assert await other.picker.metric('kvmesh_quota_decisions_total{outcome="requests",source="shared"}') == 1


async def test_quotas_and_other_pickers_are_waited_for_as_long_as_the_setting_says(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    changes: dict[str, Any] = {"redis_url": redis_server.url, "shares_load": True, "index_timeout_seconds": 0.031}
    quotas = policy(quotas=[{"tenant": "acme", "requestsPerMinute": 12}])
    async with held_pods(1) as pods, crowd_before(pods, policy=quotas, **changes) as crowd:
        redis_server.freeze()
        await crowd.send(tenant="acme").routed()
        redis_server.thaw()
    assert "decided here: no answer within 31 ms" in caplog.text
    assert "no answer within 20 ms" not in caplog.text


async def test_requests_that_were_refused_or_left_while_they_waited_have_used_nothing(
    redis_server: RedisServer,
) -> None:
    priorities = policy(
        classes={"sheddable": {"queueRequests": 0}},
        quotas=[{"requestsPerMinute": 0.06, "burstSeconds": 1000, "concurrentRequests": 1}],
    )
    changes: dict[str, Any] = {"policy": priorities, "redis_url": redis_server.url, "index_timeout_seconds": 5.0}
    async with held_pods(1) as pods, crowd_before(pods, **changes) as crowd:
        pods[0].fill()
        await crowd.saw(waiting=100)
        assert (await crowd.send("sheddable").refused()).reason == "queue-full"

        async def waits_again() -> bool:
            """What was given back is written behind the request."""
            client = crowd.send()
            while client.waits:
                if sum(line["waiting"] for line in (await crowd.picker.get("/state"))["classes"]):
                    await client.leave()
                    await crowd.waiting(0)
                    return True
                await asyncio.sleep(0.01)
            assert (await client.refused()).reason == "quota-exceeded"
            return False

        for _ in range(2):
            async with asyncio.timeout(10):
                while not await waits_again():
                    pass
        pods[0].free()
        async with asyncio.timeout(10):
            while isinstance(await (last := crowd.send()).outcome(), Refused):
                pass
        assert await last.routed() == pods[0].address

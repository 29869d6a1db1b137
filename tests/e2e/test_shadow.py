"""A policy in shadow on real servers: a quota, a class that may be refused, and an offload only count.

Real Envoy, Redis, picker and pods. Each is shown beside the same policy in force elsewhere: `test_quota`,
`test_overload` and `test_disaggregation`.
"""

import json
from pathlib import Path
from typing import Any

from tests.e2e.overload_stack import overload_stack, say
from tests.e2e.stack import eventually
from tests.e2e.test_disaggregation import pods_sum, split_stack, text

COUNTED = "kvmesh_shadow_decisions_total"


async def test_a_quota_and_a_class_that_may_be_refused_only_count(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    policy: dict[str, Any] = {
        "shadow": True,
        "quotas": [{"tenant": "acme", "requestsPerMinute": 60, "burstSeconds": 2}],
        "priorities": {"classes": [{"name": "hasty", "priority": -10, "sheddable": True, "ttftSeconds": 0.001}]},
    }
    async with overload_stack(tmp_path, policy=policy, access_log=str(log)) as mesh:
        stack = mesh.stack
        for pod in mesh.pods:
            pod.release()
        answers = [await say(mesh.client(tenant="acme")) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5
        assert not [name for answer in answers for name in answer.headers if name.startswith("x-ratelimit")]
        beyond = await stack.metric("kvmesh_shadow_refused_requests_total")
        assert 1 <= beyond <= 3  # two at once, and one a second
        assert await stack.metric(COUNTED) == beyond
        assert await stack.metric("kvmesh_shadow_tenant_quota_refusals_total") == beyond
        decision = (await stack.state())["decisions"][0]
        assert (decision["shadow"][0]["rule"], decision["shadow"][0]["reason"]) == ("quota", "requests")

        await mesh.fill()
        assert (await say(mesh.client("hasty"))).status_code == 200
        assert (await say(mesh.client())).status_code == 200  # would have waited
        (shed,) = [each for each in (await stack.state())["decisions"][:2] if each["class"] == "hasty"]
        assert [(each["rule"], each["action"], each["reason"]) for each in shed["shadow"]] == [
            ("admission", "refuse", "shed")
        ]
        assert await stack.metric("kvmesh_shadow_refused_requests_total") == beyond + 1
        assert await stack.metric(COUNTED) == beyond + 2
        assert await stack.metric("kvmesh_shed_requests_total") == 0
        assert await stack.metric("kvmesh_queue_left_total") == 0
        assert await stack.metric("kvmesh_shadow") == 1
        explained = await stack.explain({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]})
        assert explained["admission"]["verdict"] == "go"
        mesh.free()
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    found = [code for line in lines for code in line.get("shadow", ())]
    assert sorted(set(found)) == ["refuse:requests", "refuse:shed", "wait:full"]


async def test_an_offload_only_counts_and_the_decode_pod_computes_the_prompt(tmp_path: Path) -> None:
    async with split_stack(tmp_path, 1, 1, top="shadow: true\n") as (stack, prefill, decode, _):
        answer = await stack.complete(text(30))
        assert (answer.status, answer.upstream) == (200, decode[0])
        assert await stack.metric(COUNTED) == 1
        (decision,) = (await stack.state())["decisions"]
        assert [(each["rule"], each["action"]) for each in decision["shadow"]] == [("disaggregation", "offload")]
        await eventually(lambda: pods_sum(stack, decode, "vllm:request_success_total"), lambda count: count == 1)
        assert await pods_sum(stack, prefill, "vllm:request_success_total") == 0

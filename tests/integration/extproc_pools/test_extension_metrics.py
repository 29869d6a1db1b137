"""A picker that is asked for the inference extension's names counts a real request under them."""

import re
from pathlib import Path

from tests.integration.hermetic_envoy import Routed
from tests.integration.overload_pods import MODEL
from tests.integration.pools_picker import pool_document, running_mesh, send


async def test_requests_and_pods_are_shown_under_these_names_too(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, extension_metrics=True) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port, hosts="a.example.com"))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        # before the first request
        one = 'inference_pool_ready_pods{pool="llm/a",name="a"} 1.0'
        await mesh.picker.eventually("/metrics", lambda text: one in text)
        async with mesh.exchange(pool="llm/a") as exchange:
            assert isinstance(await send(exchange), Routed)
            total = f'inference_objective_request_total{{pool="llm/a",model_name="{MODEL}",priority="0",'
            page = await mesh.picker.eventually("/metrics", lambda text: total in text)
            assert f'target_model_name="{MODEL}"}} 1.0' in page
            attempts = "inference_extension_scheduler_attempts_total"
            port = pod.address.rpartition(":")[2]
            labels = f'pool="llm/a",namespace="llm",pod_name="[a-z0-9-]+",port="{port}",status="success"'
            assert re.search(f'{attempts}{{{labels},target_model_name="{MODEL}"}} 1.0\n', page)
            assert 'inference_extension_scheduler_e2e_duration_seconds_count{pool="llm/a"} 1.0' in page
            running = f'inference_objective_running_requests{{pool="llm/a",model_name="{MODEL}"}}'
            assert f"{running} 1.0" in page
        await mesh.picker.eventually("/metrics", lambda text: f"{running} 0.0" in text)


async def test_they_are_not_shown_by_themselves(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(pool_document("a", port=mesh.port, hosts="a.example.com"))
        pod = await mesh.pod("a")
        await mesh.serves("llm/a", pod.address)
        assert isinstance(await mesh.asked(pool="llm/a"), Routed)
        assert "inference_" not in await mesh.picker.get("/metrics")

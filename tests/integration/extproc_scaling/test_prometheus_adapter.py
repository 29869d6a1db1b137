"""The rule of docs/guides/autoscaling.md, as the adapter uses it, on a real Prometheus that scrapes a picker."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.e2e.stack import eventually
from tests.integration.pools_picker import policy_document, pool_document, running_mesh
from tests.prometheus.prometheus_process import Prometheus, running_prometheus
from tools.docs_site import DOCS

SCALED = {"both": {"minReplicas": 1, "maxReplicas": 6, "scaleUp": {"queueRequests": 5}}}


def adapter_rule() -> dict[str, Any]:
    """Return the page's rule."""
    page = (DOCS / "guides" / "autoscaling.md").read_text(encoding="utf-8")
    rules = "externalRules:" + page.partition("externalRules:")[2].partition("```")[0]
    (rule,) = yaml.safe_load(rules)["externalRules"]
    assert isinstance(rule, dict)
    return rule


async def number(prometheus: Prometheus, query: str) -> float | None:
    """Return what the adapter answers; None: it has no number. It refuses an answer of several series."""
    found = await prometheus.query(query)
    assert len(found) <= 1
    return found[0].points[0][1] if found else None


async def test_the_adapter_has_the_wanted_number_and_none_that_is_not_measured(tmp_path: Path) -> None:
    rule = adapter_rule()
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(
            pool_document("llama", port=mesh.port, hosts="a.example.com"),
            policy_document("scaled", pool="llama", autoscale=SCALED),
        )
        pod = await mesh.pod("llama")
        seen = "/state?pool=llm/llama"
        await mesh.eventually(seen, lambda state: any(each["ready"] for each in state.get("scale", ())))
        picker = urlsplit(mesh.picker.admin).netloc
        async with running_prometheus(tmp_path, targets={"kvmesh-picker": [picker]}) as prometheus:
            await eventually(lambda: prometheus.query(rule["seriesQuery"]), bool)
            assert await number(prometheus, rule["metricsQuery"]) is None
            pod.waiting = 10  # twice what a pod is to have
            await eventually(lambda: number(prometheus, rule["metricsQuery"]), lambda wanted: wanted == 2)

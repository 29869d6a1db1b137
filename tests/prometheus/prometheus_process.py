"""Debian's prometheus on a free port, scraping what a test names as the Prometheus operator would, and its answers."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from operate.local.ports import pick_free_port
from tests.required_programs import lacks

START_SECONDS = 30.0
END_SECONDS = 10.0
SCRAPE_SECONDS = 0.5


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; skip where it is not installed, fail where it has to be."""
    path = shutil.which(name)
    if path is None:
        lacks(f"{name} is not installed: apt-get install prometheus")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series of an answer: its labels, its points in time order."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """The running server."""

    def __init__(self, *, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def query(self, expr: str) -> list[Series]:
        """Evaluate now."""
        data = await self._get("query", query=expr)
        assert data["resultType"] == "vector", (expr, data["resultType"])
        return [
            Series(labels=each["metric"], points=((float(each["value"][0]), float(each["value"][1])),))
            for each in data["result"]
        ]

    async def query_range(self, expr: str, *, seconds: float, step_seconds: float = 1.0) -> list[Series]:
        """Evaluate over the last seconds."""
        now = time.time()
        data = await self._get("query_range", query=expr, start=now - seconds, end=now, step=step_seconds)
        return [
            Series(labels=each["metric"], points=tuple((float(at), float(value)) for at, value in each["values"]))
            for each in data["result"]
        ]

    async def exemplars(self, expr: str) -> list[tuple[dict[str, str], dict[str, str]]]:
        """Return the exemplars of the last hour that the expression's series have: labels of series and of exemplar."""
        now = time.time()
        data = await self._get("query_exemplars", query=expr, start=now - 3600, end=now + 60)
        return [(each["seriesLabels"], one["labels"]) for each in data for one in each["exemplars"]]

    async def names(self) -> set[str]:
        """Return the names of all series that it has."""
        return set(await self._get("label/__name__/values"))

    async def alerts(self, state: str = "firing") -> dict[str, list[dict[str, str]]]:
        """Return the alerts in a state: name -> the labels of each."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in (await self._get("alerts"))["alerts"]:
            if alert["state"] == state:
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found

    async def unhealthy_rules(self) -> dict[str, str]:
        """Return what went wrong when rules were last evaluated."""
        groups = (await self._get("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] == "err"}

    async def is_ready(self) -> bool:
        try:
            async with self._http.get(f"{self._url}/-/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def _get(self, path: str, **parameters: Any) -> Any:
        asked = {name: str(value) for name, value in parameters.items()}
        async with self._http.get(f"{self._url}/api/v1/{path}", params=asked) as answer:
            body = await answer.json()
        assert body["status"] == "success", (parameters, body)
        return body["data"]


@asynccontextmanager
async def running_prometheus(
    folder: Path, *, targets: Mapping[str, Sequence[str]], rules: Mapping[str, Any] | None = None
) -> AsyncIterator[Prometheus]:
    """Start it with jobs and their `host:port`s, wait until it answers, and end it."""
    command = program("prometheus")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules or {"groups": []}), encoding="utf-8")
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(_config(targets)), encoding="utf-8")
    port = pick_free_port(host="127.0.0.1", avoid=())
    options = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    options += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", "--enable-feature=exemplar-storage"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([command, *options], stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:
            prometheus = Prometheus(url=f"http://127.0.0.1:{port}", http=http)
            deadline = time.monotonic() + START_SECONDS
            while not await prometheus.is_ready():
                words = (folder / "prometheus.log").read_text()
                assert process.poll() is None, words
                assert time.monotonic() < deadline, words
                await asyncio.sleep(0.05)
            yield prometheus
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_SECONDS)


def _config(targets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    jobs = []
    for name, addresses in targets.items():
        # what the operator adds to each series of a ServiceMonitor; `endpoint` is one of our own labels, too
        added = {"endpoint": "http-admin", "namespace": "kvmesh-system", "service": name, "container": "kvmesh"}
        labels = added if name.startswith("kvmesh-") else {}
        static = [{"targets": list(addresses), "labels": labels}]
        jobs.append({"job_name": name, "honor_labels": True, "static_configs": static})
    every = f"{SCRAPE_SECONDS * 1000:.0f}ms"
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": ["rules.yaml"],
        "scrape_configs": jobs,
    }

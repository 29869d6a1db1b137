"""What Envoy was given and did not take: a real Envoy reads listeners and clusters from files that change."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from extproc.pages.findings import Finding, Severity
from kvmesh.admin.admin_login import AdminLogin
from operate.doctor.checks import judge
from operate.doctor.facts import EnvoyFacts
from operate.doctor.gather_admin import gather_envoy
from operate.doctor.questions import open_client
from tests.integration.envoy_process import free_addresses, running_envoy
from tests.unit.operate_doctor.doctor_facts import facts

TYPE = "type.googleapis.com/envoy."
LISTENER, CLUSTER = f"{TYPE}config.listener.v3.Listener", f"{TYPE}config.cluster.v3.Cluster"
ROUTER = {"name": "router", "typed_config": {"@type": f"{TYPE}extensions.filters.http.router.v3.Router"}}


@dataclass(slots=True)
class Xds:
    """Files that one Envoy follows instead of a control plane."""

    folder: Path
    admin: str = ""
    version: int = 0

    def give(self, name: str, type_name: str, *resources: dict[str, Any]) -> None:
        """Replace what it is told; it looks when a file is moved to its place."""
        self.version += 1
        typed = [{"@type": type_name, **resource} for resource in resources]
        new = self.folder / f"{name}.new"
        new.write_text(json.dumps({"version_info": str(self.version), "resources": typed}), encoding="utf-8")
        new.replace(self.folder / f"{name}.json")

    def sources(self, config: dict[str, Any]) -> None:
        """Have Envoy's own listeners and clusters come from the files, as they are."""
        static = config["static_resources"]
        self.give("lds", LISTENER, *static.pop("listeners"))
        self.give("cds", CLUSTER, *static.pop("clusters"))
        config["node"] = {"id": "test", "cluster": "test"}
        config["dynamic_resources"] = {
            f"{name}_config": {
                "resource_api_version": "V3",
                "path_config_source": {
                    "path": str(self.folder / f"{name}.json"),
                    "watched_directory": {"path": str(self.folder)},
                },
            }
            for name in ("lds", "cds")
        }

    def resources(self, name: str) -> list[dict[str, Any]]:
        """Return what it is told now."""
        found: list[dict[str, Any]] = json.loads((self.folder / f"{name}.json").read_text())["resources"]
        return [{key: value for key, value in each.items() if key != "@type"} for each in found]

    async def refused(self, counter: str) -> None:
        """Return when Envoy has refused an update."""
        async with aiohttp.ClientSession() as http, asyncio.timeout(20.0):
            while True:
                async with http.get(f"{self.admin}/stats?filter={counter}") as response:
                    if not (await response.text()).strip().endswith(": 0"):
                        return
                await asyncio.sleep(0.02)

    async def facts(self) -> EnvoyFacts:
        async with open_client(timeout_seconds=20.0, login=AdminLogin()) as client:
            return await gather_envoy(client, self.admin)


@asynccontextmanager
async def followed(tmp_path: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> AsyncIterator[Xds]:
    """Run an Envoy of envoy/local.yaml that follows files; nobody is behind it."""
    folder = tmp_path / "xds"
    folder.mkdir()
    xds = Xds(folder=folder)
    picker, *pods = free_addresses(3)

    def both(config: dict[str, Any]) -> None:
        change(config)
        xds.sources(config)

    async with running_envoy(tmp_path, file="local.yaml", picker_port=picker.port, pods=pods, change=both) as process:
        xds.admin = process.admin
        yield xds


def wrong(envoy: EnvoyFacts, *names: str) -> list[Finding]:
    found = judge(facts(envoy=envoy), names=names)
    return [finding for finding in found if finding.severity is not Severity.OK]


def manager_of(listener: dict[str, Any]) -> dict[str, Any]:
    manager: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def _picks(entry: dict[str, Any]) -> bool:
    modes = entry["typed_config"].get("processing_mode", {})
    return bool(modes.get("request_header_mode") == "SEND")


async def test_a_listener_that_a_running_envoy_refuses_is_an_error_and_not_judged_as_in_force(tmp_path: Path) -> None:
    def no_pick(config: dict[str, Any]) -> None:
        manager = manager_of(config["static_resources"]["listeners"][0])
        taken.extend(manager["http_filters"])
        manager["http_filters"] = manager["http_filters"][-1:]

    taken: list[dict[str, Any]] = []
    async with followed(tmp_path, no_pick) as xds:
        before = await xds.facts()
        assert (before.refused, wrong(before, "envoy-updates")) == ((), [])
        [listener] = xds.resources("lds")
        manager_of(listener)["http_filters"] = [ROUTER, *taken]
        xds.give("lds", LISTENER, listener)
        await xds.refused("listener_manager.lds.update_rejected")
        found = await xds.facts()
    [refused] = found.refused
    assert (refused.kind, refused.has_earlier) == ("listener", True)
    assert "must be the last filter" in refused.details
    assert found.rejected_updates == {"listener": 1}
    pick, updates = wrong(found, "envoy-updates", "envoy-filter")
    assert (pick.check, pick.severity) == ("envoy-filter", Severity.ERROR)  # the refused one has the filter
    assert (updates.check, updates.severity) == ("envoy-updates", Severity.ERROR)
    assert "runs with the version before" in updates.seen


async def test_a_refusal_that_was_mended_is_no_finding(tmp_path: Path) -> None:
    async with followed(tmp_path) as xds:
        [listener] = xds.resources("lds")
        bad = json.loads(json.dumps(listener))
        manager_of(bad)["http_filters"].insert(0, ROUTER)
        xds.give("lds", LISTENER, bad)
        await xds.refused("listener_manager.lds.update_rejected")
        manager_of(listener)["stat_prefix"] = "mended"
        xds.give("lds", LISTENER, listener)
        async with asyncio.timeout(20.0):
            while (await xds.facts()).refused:
                await asyncio.sleep(0.02)
        found = await xds.facts()
    assert found.rejected_updates == {"listener": 1}
    assert wrong(found, "envoy-updates") == []


async def test_clusters_that_envoy_refuses_are_a_warning_and_a_missing_picker_cluster_an_error(tmp_path: Path) -> None:
    async with followed(tmp_path) as xds:
        clusters = xds.resources("cds")
        picker = (await xds.facts()).picking_filter()
        assert picker is not None
        xds.give("cds", CLUSTER, *(each for each in clusters if each["name"] != picker.cluster))
        async with asyncio.timeout(20.0):
            while (await xds.facts()).cluster(picker.cluster) is not None:
                await asyncio.sleep(0.02)
        xds.give("cds", CLUSTER, {"name": "bad", "type": "EDS", "lb_policy": "CLUSTER_PROVIDED"}, *clusters)
        await xds.refused("cluster_manager.cds.update_rejected")
        found = await xds.facts()
    assert found.rejected_updates["cluster"] >= 1
    [updates] = wrong(found, "envoy-updates")
    assert (updates.severity, "updates of clusters" in updates.seen) == (Severity.WARNING, True)


async def test_a_filter_that_no_route_switches_on_is_an_error(tmp_path: Path) -> None:
    def off(config: dict[str, Any]) -> None:
        manager = manager_of(config["static_resources"]["listeners"][0])
        picking = next(each for each in manager["http_filters"] if _picks(each))
        picking["disabled"] = True
        names.append(picking["name"])

    def on_one_route(config: dict[str, Any]) -> None:
        off(config)
        manager = manager_of(config["static_resources"]["listeners"][0])
        route = manager["route_config"]["virtual_hosts"][0]["routes"][0]
        per_route = {"@type": f"{TYPE}extensions.filters.http.ext_proc.v3.ExtProcPerRoute", "overrides": {}}
        route["typed_per_filter_config"] = {names[-1]: per_route}

    names: list[str] = []
    for number, (change, expected) in enumerate(((off, ["envoy-routes"]), (on_one_route, []))):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with followed(folder, change) as xds:
            found = await xds.facts()
        assert [finding.check for finding in wrong(found, "envoy-filter", "envoy-routes")] == expected

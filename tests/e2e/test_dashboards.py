"""Dashboards and alerts on a real Prometheus that scrapes a real mesh: no panel is empty, every alert has a real cause.

One mesh serves the whole file, and the tests run in the file's order: well, then busy, then troubled, then worse.
"""

import asyncio
import itertools
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from tests.e2e.stack import eventually
from tests.e2e.watched_mesh import LONG_WORDS, SMALL, UNREAD, WatchedMesh, watched_mesh
from tests.e2e.wrong_pools import WRONG_POOLS
from tests.prometheus.monitoring import BOARDS, Json, alerts, panels_of, recordings
from tests.prometheus.prometheus_process import SCRAPE_SECONDS, Series
from tests.unit.kv_indexer_follow.kv_fakes import stored
from tools.dashboard_drawing import Line, draw
from tools.dashboard_pictures import as_grafana_asks, legend_of, redis_lines, usual_values

TARGETS = 6  # a picker, two indexers, three pods
FIRE_SECONDS = 100.0  # many times what it takes where nothing else runs
SHOWN_SECONDS = 60.0  # what a dashboard shows
PICTURES = os.environ.get("DRAW_DASHBOARDS")  # a folder: what was seen is drawn there, to be looked at
CAUSED: set[str] = set()  # the alerts that have fired so far

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WatchedMesh]:
    async with watched_mesh(tmp_path_factory.mktemp("watched")) as running:
        yield running


async def test_no_alert_fires_while_all_is_well(mesh: WatchedMesh) -> None:
    mesh.talk(workers=2, tenant="acme", stream=True, pause_seconds=0.2)
    await eventually(lambda: mesh.prometheus.query("up == 1"), lambda found: len(found) == TARGETS)
    # twelve seconds: longer than any wait of an alert but for those that take fifteen
    await eventually(
        lambda: mesh.prometheus.query("count_over_time(up[10m]) >= 24"), lambda found: len(found) == TARGETS
    )
    assert await mesh.prometheus.unhealthy_rules() == {}
    # each client says something new in each request, and how long a lookup takes on a busy machine is not ours to say
    firing = await mesh.prometheus.alerts()
    assert {
        name: labels for name, labels in firing.items() if name not in {"KvmeshHitRatioLow", "KvmeshLookupSlow"}
    } == {}


async def test_alerts_of_overload_and_of_a_pod_that_misbehaves(mesh: WatchedMesh, tmp_path: Path) -> None:
    mesh.odd.fails = mesh.odd.refuses_some = mesh.odd.lies = mesh.odd.wants_key = True
    mesh.talk(workers=3, tenant="acme", stream=True)
    mesh.talk(workers=3, model="chat")
    mesh.talk(workers=5, model=SMALL, objective="critical")
    mesh.talk(workers=1, model=UNREAD, pause_seconds=0.2)
    mesh.talk(workers=2, tenant="stingy", pause_seconds=0.2)
    mesh.talk(workers=1, objective="nobody", pause_seconds=0.2)
    mesh.talk(workers=6, objective="critical", max_tokens=16)
    mesh.talk(workers=12, objective="sheddable", shared=False, words=300, pause_seconds=0.3)
    mesh.talk(workers=30, shared=False, words=200)  # more than the pods have room for: the queue is never empty
    mesh.talk(workers=3, objective="critical", shared=False, words=LONG_WORDS)
    server = mesh.redis.client()
    server.config_set("maxmemory-policy", "allkeys-random")  # nothing is evicted yet: there is no limit
    server.hset("{kv2}slots", "999", "nothing that anybody could read")
    for name, text in WRONG_POOLS.items():
        (mesh.pools_folder / name).write_text(text, encoding="utf-8")
    troubles = asyncio.create_task(trouble(mesh), name="troubles")
    try:
        await fires(
            mesh,
            *(
                "KvmeshPoolFails",
                "KvmeshPrefillLegsFail",
                "KvmeshEndpointFails",
                "KvmeshEndpointRefuses",
                "KvmeshEndpointWantsKey",
            ),
            *("KvmeshClassShed", "KvmeshPromiseBurnsFast", "KvmeshPromiseBurnsSlowly"),
            *("KvmeshQueueNeverEmpty", "KvmeshStepInForce"),
            *("KvmeshIndexBehind", "KvmeshEventsNotUnderstood", "KvmeshFinding", "KvmeshModelFinding"),
            "KvmeshTextOnly",
            *("KvmeshPredictionsOff", "KvmeshHitRatioLow", "KvmeshUnreadableRecords"),
            *("KvmeshPoolProblem", "KvmeshPoolConflict", "KvmeshSourceNotLive"),
        )
    finally:
        troubles.cancel()
        await asyncio.gather(troubles, return_exceptions=True)


async def trouble(mesh: WatchedMesh) -> None:
    """Publish what cannot be understood, from a clock that is wrong; lose a batch now and then; be deaf at times."""
    for number in itertools.count(1):
        await mesh.odd_events.publish(stored(number), lost=number % 4 == 0)
        await mesh.odd_events.publish(stored(number + 1_000_000, parent=number + 5_000_000))
        await mesh.odd_events.publish({"type": "BlockStored", "block_hashes": "none"})
        await (mesh.odd.deafen() if number % 2 else mesh.odd.hear())
        await asyncio.sleep(0.5)


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
async def test_no_panel_is_empty(mesh: WatchedMesh, board: Json) -> None:
    # some numbers need half a minute of samples
    _, drawn = await eventually(lambda: looked_at(mesh, board), lambda looked: looked[0] == [], seconds=SHOWN_SECONDS)
    if PICTURES:
        draw(board, drawn, Path(PICTURES) / f"{board['uid']}.png")


async def looked_at(mesh: WatchedMesh, board: Json) -> tuple[list[str], dict[str, list[Line]]]:
    """Return the targets without data, and the lines of each panel."""
    empty: list[str] = []
    drawn: dict[str, list[Line]] = {}
    for panel in panels_of(board):
        for target in panel["targets"]:
            if "expr" in target:
                found = await shown(mesh, panel, target["expr"])
                lines = [
                    Line(legend=legend_of(target, each.labels), labels=each.labels, points=each.points)
                    for each in found
                ]
            else:
                lines = redis_lines(redis.Redis.from_url(mesh.redis.url, decode_responses=True), panel, target)
            empty += [] if any(line.known for line in lines) else [f"{panel['title']}: {target}"]
            drawn.setdefault(panel["title"], []).extend(lines)
    return empty, drawn


async def test_every_recording_rule_has_data(mesh: WatchedMesh) -> None:
    names = [rule["record"] for rule in recordings()]

    async def without_data() -> list[str]:
        found = {name: await mesh.prometheus.query_range(name, seconds=SHOWN_SECONDS) for name in names}
        return [record for record, series in found.items() if not has_data(series)]

    await eventually(without_data, lambda empty: empty == [], seconds=SHOWN_SECONDS)


async def test_alerts_of_a_redis_that_evicts(mesh: WatchedMesh) -> None:
    server = mesh.redis.client()
    server.config_set("maxmemory", int(server.info("memory")["used_memory"] * 0.98))
    await fires(mesh, "KvmeshRedisMayEvict", "KvmeshRedisEvicted", "KvmeshRedisAlmostFull")
    server.config_set("maxmemory", 0)
    server.config_set("maxmemory-policy", "noeviction")


async def test_alerts_of_a_pod_that_freezes_and_of_one_that_takes_no_connections(mesh: WatchedMesh) -> None:
    await mesh.silence()
    mesh.odd.fails = mesh.odd.refuses_some = mesh.odd.wants_key = False
    # a frozen pod's clients leave: all of them may be its own, and then nobody asks the others
    mesh.talk(workers=8, shared=False, words=20, tenant="acme", patience_seconds=2)
    frozen = next(iter(mesh.pods.values()))
    frozen.send_signal(signal.SIGSTOP)
    deafness = asyncio.create_task(be_deaf(mesh), name="deafness")
    try:
        await fires(mesh, "KvmeshEndpointSilent", "KvmeshRequestsRerouted")
    finally:
        deafness.cancel()
        await asyncio.gather(deafness, return_exceptions=True)
    await mesh.odd.hear()
    frozen.send_signal(signal.SIGCONT)


async def be_deaf(mesh: WatchedMesh) -> None:
    """Take no connections, and some now and then: a picker that had to connect anew would take the pod for gone."""
    while True:
        await mesh.odd.deafen()
        await asyncio.sleep(1.5)
        await mesh.odd.hear()
        await asyncio.sleep(0.3)


async def test_alerts_of_a_redis_that_freezes_and_dies(mesh: WatchedMesh) -> None:
    mesh.redis.freeze()
    await fires(mesh, "KvmeshPicksDegraded", "KvmeshLookupSlow", "KvmeshQuotaWritesFail")
    mesh.redis.kill()  # an indexer whose Redis is frozen takes seconds for its /metrics: longer than our scrapes wait
    await fires(mesh, "KvmeshRedisDown")
    mesh.redis.start()


async def test_alerts_of_indexers_that_freeze(mesh: WatchedMesh) -> None:
    mesh.pools.kill()
    mesh.signal("indexer", signal.SIGSTOP)
    await fires(mesh, "KvmeshNoIndexerReady", "KvmeshReplicaDown", "KvmeshNoEvents")
    mesh.signal("indexer", signal.SIGCONT)


async def test_alerts_of_pods_that_are_all_gone(mesh: WatchedMesh) -> None:
    for process in mesh.pods.values():
        process.kill()
    await mesh.odd.stop()
    await fires(mesh, "KvmeshNoReadyEndpoint")


async def test_alerts_of_a_picker_that_freezes(mesh: WatchedMesh) -> None:
    await mesh.silence()
    mesh.signal("extproc", signal.SIGSTOP)
    await fires(mesh, "KvmeshNoPickerReady")
    mesh.signal("extproc", signal.SIGCONT)


async def test_every_alert_has_been_caused() -> None:
    assert {alert["alert"] for alert in alerts()} == CAUSED


async def fires(mesh: WatchedMesh, *names: str) -> None:
    """Wait until each has fired."""
    missing = set(names)
    deadline = time.monotonic() + FIRE_SECONDS
    while missing:
        firing = await mesh.prometheus.alerts()
        CAUSED.update(missing & set(firing))
        missing -= set(firing)
        pending = set(await mesh.prometheus.alerts("pending"))
        assert not missing or time.monotonic() < deadline, (
            f"never: {missing}; pending: {pending}; firing: {set(firing)}"
        )
        await asyncio.sleep(0.2)


async def shown(mesh: WatchedMesh, panel: Json, asked: str) -> list[Series]:
    """Return what Grafana would show, of one pod after the other where a panel is of one."""
    found = []
    for endpoint in [*mesh.pods, mesh.odd.address]:
        values = usual_values(scrape_seconds=SCRAPE_SECONDS, shown_seconds=SHOWN_SECONDS, endpoint=endpoint)
        expr = as_grafana_asks(asked, values)
        if panel["type"] == "timeseries":
            found += await mesh.prometheus.query_range(expr, seconds=SHOWN_SECONDS)
        else:
            found += await mesh.prometheus.query(expr)
        if "$endpoint" not in asked:
            break
    return found


def has_data(series: Iterable[Series]) -> bool:
    """Tell whether anything is there to be drawn; 0 ÷ 0 is not."""
    return any(not math.isnan(value) for each in series for _, value in each.points)

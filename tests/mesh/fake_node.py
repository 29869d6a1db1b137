"""A node that runs nothing: what is scheduled to it becomes ready, what is deleted goes, and claims get a volume.

Nobody answers at the addresses of pods.

The image says what else becomes of a pod: of a registry `missing.example` it cannot be pulled, of `crashing.example`
its container ends again and again.
"""

import asyncio
from datetime import UTC, datetime
from itertools import count
from typing import Any

import aiohttp

NODE = "fake-node"
POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 10.0
VOLUME_SIZE = "1Ti"
STATUS = {"Content-Type": "application/merge-patch+json"}
TROUBLES = {
    "missing.example/": ("ImagePullBackOff", 'Back-off pulling image "{image}": not found'),
    "crashing.example/": ("CrashLoopBackOff", "back-off 10s restarting failed container"),
}


async def run_fake_node(session: aiohttp.ClientSession) -> None:
    """Be that node until cancelled; `session` is an administrator's."""
    await _register(session)
    addresses = count(1)
    next_heartbeat = 0.0
    now = asyncio.get_running_loop().time
    while True:
        if now() >= next_heartbeat:
            await _beat(session)
            next_heartbeat = now() + HEARTBEAT_SECONDS
        for pod in await _items(session, f"/api/v1/pods?fieldSelector=spec.nodeName={NODE}"):
            await _attend(session, pod, addresses)
        for claim in await _items(session, "/api/v1/persistentvolumeclaims"):
            if claim["status"].get("phase") == "Pending" and "volumeName" not in claim["spec"]:
                await _provide(session, claim)
        await asyncio.sleep(POLL_SECONDS)


async def _register(session: aiohttp.ClientSession) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}}
    async with session.post("/api/v1/nodes", json=node) as response:
        assert response.status in {201, 409}, await response.text()


async def _beat(session: aiohttp.ClientSession) -> None:
    room = {"cpu": "1000", "memory": "1000Gi", "pods": "2000", "ephemeral-storage": "1000Gi"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": _now()}
    status = {"capacity": room, "allocatable": room, "conditions": [ready]}
    async with session.patch(f"/api/v1/nodes/{NODE}/status", json={"status": status}, headers=STATUS) as response:
        assert response.status == 200, await response.text()


async def _items(session: aiohttp.ClientSession, path: str) -> list[dict[str, Any]]:
    async with session.get(path) as response:
        assert response.status == 200, await response.text()
        items: list[dict[str, Any]] = (await response.json())["items"]
        return items


async def _attend(session: aiohttp.ClientSession, pod: dict[str, Any], addresses: "count[int]") -> None:
    meta = pod["metadata"]
    path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
    if "deletionTimestamp" in meta:
        async with session.delete(path, json={"gracePeriodSeconds": 0}):
            return
    if pod["status"].get("containerStatuses"):
        return
    number = next(addresses)
    status = _status(pod, address=f"10.244.{number // 250}.{number % 250 + 1}")
    async with session.patch(f"{path}/status", json={"status": status}, headers=STATUS):
        return  # 404: it went in between


def _status(pod: dict[str, Any], *, address: str) -> dict[str, Any]:
    states = []
    for container in pod["spec"]["containers"]:
        image = container["image"]
        trouble = next((words for registry, words in TROUBLES.items() if image.startswith(registry)), None)
        state: dict[str, Any] = {"running": {"startedAt": _now()}}
        if trouble is not None:
            state = {"waiting": {"reason": trouble[0], "message": trouble[1].format(image=image)}}
        shown = {"name": container["name"], "image": image, "imageID": image, "restartCount": 0, "state": state}
        states.append(shown | {"ready": trouble is None, "started": trouble is None})
    ready = all(each["ready"] for each in states)
    placed = [each for each in pod["status"]["conditions"] if each["type"] == "PodScheduled"]
    told = {"status": "True" if ready else "False", "lastTransitionTime": _now()}
    return {
        "phase": "Running" if ready else "Pending",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": _now(),
        "containerStatuses": states,
        "conditions": [*placed, *({"type": name, **told} for name in ("Ready", "ContainersReady"))],
    }


async def _provide(session: aiohttp.ClientSession, claim: dict[str, Any]) -> None:
    meta = claim["metadata"]
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{meta['namespace']}-{meta['name']}-{meta['uid']}"},
        "spec": {
            "capacity": {"storage": VOLUME_SIZE},
            "accessModes": claim["spec"]["accessModes"],
            "hostPath": {"path": "/nowhere"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
        },
    }
    async with session.post("/api/v1/persistentvolumes", json=volume) as response:
        assert response.status in {201, 409}, await response.text()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

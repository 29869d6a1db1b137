"""A cluster of the size that we promise is known within the time that we promise."""

import asyncio
import time
from pathlib import Path

from kvmesh.documents.document_kinds import MESH_KINDS
from kvmesh.documents.documents import ClusterAccess, Snapshot
from kvmesh.documents.pool_resolver import PoolResolver
from kvmesh.documents.sources import kubernetes_source
from tests.integration.kube_documents import POLICY_CRD, POOL_CRD, following, pod, policy, pool
from tests.kube_api import KubeApi, kube_api


def _fill(api: KubeApi) -> None:
    api.loose_crd(**POOL_CRD)
    api.loose_crd(**POLICY_CRD)
    for number in range(2000):
        address = f"10.0.{number // 250}.{number % 250}"
        api.put(pod(f"p{number}", address, namespace=f"n{number % 20}", app=f"a{number % 200}"))
    for number in range(200):
        api.put(pool(f"q{number}", namespace=f"n{number % 20}", app=f"a{number}"))
    for number in range(1000):
        api.put(policy(f"r{number}", namespace=f"n{number % 20}"))


async def test_two_thousand_pods_and_a_thousand_policies_are_known_within_ten_seconds(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        _fill(api)
        source = kubernetes_source(ClusterAccess(kubeconfig=api.kubeconfig()), kinds=MESH_KINDS)
        began_at = time.monotonic()
        async with following(source) as told:
            snapshot = await told.until(lambda snapshot: snapshot.synced)
            resolved = PoolResolver().resolve(snapshot.documents)
            took = time.monotonic() - began_at
        assert (len(snapshot.of("Pod")), len(snapshot.of("InferencePolicy"))) == (2000, 1000)
        assert (len(resolved.pools), sum(len(each.endpoints) for each in resolved.pools.values())) == (200, 2000)
        assert len(told.snapshots) == 1
        assert took < 10.0


async def test_one_changed_pod_of_two_thousand_is_told_within_a_second(tmp_path: Path) -> None:
    def moved(snapshot: Snapshot) -> bool:
        return any(each["status"]["podIP"] == "10.99.0.1" for each in snapshot.of("Pod"))

    async with kube_api(tmp_path) as api:
        _fill(api)
        source = kubernetes_source(ClusterAccess(kubeconfig=api.kubeconfig()), kinds=MESH_KINDS)
        async with following(source) as told:
            await told.until(lambda snapshot: snapshot.synced)
            async with asyncio.timeout(10.0):
                while not api.watches("pods"):
                    await asyncio.sleep(0.01)
            began_at = time.monotonic()
            api.put(pod("p7", "10.99.0.1", namespace="n7", app="a7"))
            await told.until(moved)
            assert time.monotonic() - began_at < 1.0

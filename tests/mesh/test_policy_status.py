"""The status of InferencePolicies on a real API server: two installations, their entries, and kubectl's columns."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.policy.model_tokens import ModelTokens
from extproc.pools.mesh import status_updates
from extproc.reach.mesh_policy import NO_TOKENS, MeshPolicy, MeshState
from kvmesh.documents.documents import ClusterAccess, Snapshot
from kvmesh.documents.sources import kubernetes_source, status_writer
from tests.e2e.stack import eventually
from tests.mesh.kube import Kube
from tests.mesh.mesh_objects import kubernetes_object
from tools.policy_crd import COLUMNS, policy_crd

POLICY = "kvmesh.io/v1alpha1"


@asynccontextmanager
async def installation(
    kube: Kube, namespace: str, *, reads: list[str], tokens: Mapping[str, Sequence[ModelTokens]] = NO_TOKENS
) -> AsyncIterator[list[MeshState]]:
    """Run what a picker does with policies; yield the states that it has come to, the last one last."""
    access = ClusterAccess(kubeconfig=kube.kubeconfig, program="kvmesh-picker")
    writer = status_writer(access, lease_namespace=namespace, identity=f"{namespace}-1")
    policy, states = MeshPolicy(installation=namespace), [MeshState()]

    def take(snapshot: Snapshot) -> None:
        states.append(policy.update(snapshot, now=datetime.now(UTC), tokens=dict(tokens)))
        writer.want(status_updates(states[-1]))

    tasks = [
        asyncio.create_task(writer.run()),
        asyncio.create_task(kubernetes_source(access, namespaces=reads).run(take)),
    ]
    try:
        yield states
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def policy_of(name: str, strategy: str) -> dict[str, Any]:
    spec = {"scoring": {"strategy": strategy}}
    return kubernetes_object(POLICY, "InferencePolicy", "llm", name, spec=spec)


async def entries(kube: Kube, name: str) -> Mapping[str, Any]:
    """Return who says what of a policy: controller name -> reason of Programmed; and its resource version."""
    text = await asyncio.to_thread(kube.kubectl, "get", "infpol", "-n", "llm", name, "-o", "yaml")
    document = yaml.safe_load(text)
    found = {
        each["controllerName"].rpartition("/")[2]: next(
            c["reason"] for c in each["conditions"] if c["type"] != "Accepted"
        )
        for each in (document.get("status") or {}).get("ancestors", ())
    }
    return {**found, "version": document["metadata"]["resourceVersion"]}


@pytest.mark.asyncio(loop_scope="session")
async def test_two_installations_with_different_views_come_to_rest_and_columns_show_what_is_not_in_force(
    kube: Kube, tmp_path: Path
) -> None:
    del tmp_path
    namespaces = ("llm", "one", "two")
    kube.apply(policy_crd(), *({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}} for n in namespaces))
    kube.kubectl("wait", "--for=condition=Established", "crd", "inferencepolicies.kvmesh.io", "--timeout=30s")
    ports = {"ports": [{"port": 9002}]}
    kube.apply(*(kubernetes_object("v1", "Service", n, "kvmesh-picker", spec=ports) for n in ("one", "two")))
    labels, pool_ports = {"kvmesh.io/pool": "true"}, {"ports": [{"name": "http", "port": 8000}], "selector": {"a": "b"}}
    pool = kubernetes_object("v1", "Service", "llm", "llama", spec=pool_ports)
    pool["metadata"]["labels"] = labels
    kube.apply(pool, policy_of("older", "prefix-aware"))
    await asyncio.sleep(1.1)  # creation times are whole seconds: the second policy has to be the younger one
    kube.apply(policy_of("younger", "round-robin"))
    async with installation(kube, "one", reads=[]) as one, installation(kube, "two", reads=["llm"]) as two:

        async def both() -> Mapping[str, Any]:
            return await entries(kube, "younger")

        await eventually(both, lambda found: {"one", "two"} <= found.keys())
        await eventually(lambda: _done(not one[-1].unwritten and not two[-1].unwritten), bool)
        before = await both()
        await asyncio.sleep(2.0)  # in which installations that rewrite each other would have done so
        assert await both() == before
    assert (before["one"], before["two"]) == ("Conflicted", "Conflicted")
    table = kube.kubectl("get", "infpol", "-n", "llm").splitlines()
    assert table[0].split() == [
        "NAME",
        "TARGET",
        "STRATEGY",
        "ACCEPTED",
        "PROGRAMMED",
        "REASON",
        "WARNING",
        "TOKENS",
        "AGE",
    ]
    assert "False" in table[2] and "Conflicted" in table[2]
    assert "True" in table[1] and "Programmed" in table[1]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_model_without_tokens_is_in_the_status_and_in_kubectls_column_until_there_are_some(kube: Kube) -> None:
    kube.apply(
        policy_crd(), *({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}} for n in ("llm", "t"))
    )
    kube.kubectl("wait", "--for=condition=Established", "crd", "inferencepolicies.kvmesh.io", "--timeout=30s")
    kube.apply(kubernetes_object("v1", "Service", "t", "kvmesh-picker", spec={"ports": [{"port": 9002}]}))
    spec = {"ports": [{"name": "http", "port": 8000}], "selector": {"a": "b"}}
    kube.apply(kubernetes_object("v1", "Service", "llm", "llama", spec=spec, labels={"kvmesh.io/pool": "true"}))
    kube.apply(policy_of("tokens", "kv-aware"))
    seen = {"llm/llama": (ModelTokens(model="m", wanted="auto", seen="text", reason="text-only", message="m: mend"),)}

    async def column() -> str:
        path = "-o=custom-columns=T:" + COLUMNS["Tokens"].replace('"', "'")
        words = await asyncio.to_thread(kube.kubectl, "get", "infpol", "-n", "llm", "tokens", path, "--no-headers")
        return words.strip()

    async with installation(kube, "t", reads=["llm"], tokens=seen):
        await eventually(column, lambda shown: shown == "TextOnly")
        seen.clear()
        kube.kubectl("annotate", "infpol", "-n", "llm", "tokens", "looked=again")  # a picker looks every few seconds
        await eventually(column, lambda shown: shown == "<none>")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_host_stays_with_its_first_claim_when_an_older_policy_claims_it_and_the_picker_restarts(
    kube: Kube,
) -> None:
    kube.apply(
        policy_crd(), *({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}} for n in ("hosts", "h"))
    )
    kube.kubectl("wait", "--for=condition=Established", "crd", "inferencepolicies.kvmesh.io", "--timeout=30s")
    kube.apply(kubernetes_object("v1", "Service", "h", "kvmesh-picker", spec={"ports": [{"port": 9002}]}))
    spec = {"ports": [{"name": "http", "port": 8000}], "selector": {"a": "b"}}
    names, labels = ("first", "old"), {"kvmesh.io/pool": "true"}
    kube.apply(*(kubernetes_object("v1", "Service", "hosts", name, spec=spec, labels=labels) for name in names))

    def claims(name: str, *hosts: str) -> dict[str, Any]:
        target = {"group": "", "kind": "Service", "name": name}
        return kubernetes_object(
            POLICY, "InferencePolicy", "hosts", name, spec={"targetRefs": [target], "hosts": list(hosts)}
        )

    def is_settled(states: list[MeshState]) -> bool:
        pools = {name: config.hosts for name, config in states[-1].configs.items()}
        return not states[-1].unwritten and pools == {"hosts/first": {"llm.example.com"}, "hosts/old": frozenset()}

    kube.apply(claims("old"))
    await asyncio.sleep(1.1)  # creation times are whole seconds
    kube.apply(claims("first", "llm.example.com"))
    async with installation(kube, "h", reads=["hosts"]) as before:
        await eventually(lambda: _done(is_settled(before)), bool)
        kube.apply(claims("old", "llm.example.com"))
        await eventually(lambda: _done(before[-1].problems != () and is_settled(before)), bool)
    async with installation(kube, "h", reads=["hosts"]) as after:
        await eventually(lambda: _done(after[-1].configs != {}), bool)
        assert is_settled(after)
    text = kube.kubectl("get", "infpol", "-n", "hosts", "-o", "yaml")
    written = {
        each["metadata"]["name"]: each["status"]["ancestors"][0]["hosts"] for each in yaml.safe_load(text)["items"]
    }
    assert written == {
        "first": [{"name": "llm.example.com", "inForce": True}],
        "old": [{"name": "llm.example.com", "inForce": False}],
    }


async def _done(value: bool) -> bool:
    return value

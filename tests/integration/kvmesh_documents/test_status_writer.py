"""Status is written by one replica at a time, only where it differs, and never over somebody else's work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.documents import status_writer as writing
from kvmesh.documents.documents import ClusterAccess, DocumentKey, StatusUpdate
from kvmesh.documents.sources import status_writer
from tests.integration.kube_documents import POLICY_CRD, eventually, policy
from tests.kube_api import KubeApi, kube_api

LEASE = "Lease.coordination.k8s.io"


@asynccontextmanager
async def _writing(
    api: KubeApi, identity: str, token: str = "admin", lease: str = "kvmesh-status-writer"
) -> AsyncIterator[Any]:
    access = ClusterAccess(kubeconfig=api.kubeconfig(token))
    writer = status_writer(access, lease_namespace="default", identity=identity, lease_name=lease)
    task = asyncio.create_task(writer.run(), name=f"writer-{identity}")
    try:
        yield writer
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _entry(words: str = "all well", *, installation: str = "default") -> dict[str, Any]:
    condition = {
        "type": "Accepted",
        "status": "True",
        "reason": "Accepted",
        "message": words,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    return {
        "ancestorRef": {"group": "", "kind": "Service", "namespace": installation, "name": "kvmesh-picker"},
        "controllerName": f"kvmesh.io/picker/{installation}",
        "conditions": [condition],
    }


def _accepted(words: str) -> dict[str, Any]:
    return {"ancestors": [_entry(words)]}


def _update(document: dict[str, Any], words: str = "all well") -> StatusUpdate:
    metadata = document["metadata"]
    key = DocumentKey("kvmesh.io", "InferencePolicy", metadata["namespace"], metadata["name"])
    return StatusUpdate(key=key, uid=metadata["uid"], generation=metadata["generation"], entry=_entry(words))


def _status(api: KubeApi, name: str) -> Any:
    return (api.get("InferencePolicy", f"llm/{name}") or {}).get("status")


def _writes(api: KubeApi) -> list[str]:
    return [
        path for verb, plural, path, _ in api.requests if "inferencepolicies" in path and verb in ("update", "patch")
    ]


async def test_one_replica_leads_and_writes_and_the_other_takes_over_when_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.1)
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POLICY_CRD)
        one, two = api.put(policy("one")), api.put(policy("two"))
        async with _writing(api, "b") as second:
            async with _writing(api, "a") as first:
                await eventually(lambda: first.leads or second.leads)
                first.want([_update(one)])
                second.want([_update(one)])
                await eventually(lambda: _status(api, "one") == _accepted("all well"))
                assert first.leads != second.leads
                leader = "a" if first.leads else "b"
                assert (api.get(LEASE, "default/kvmesh-status-writer") or {})["spec"]["holderIdentity"] == leader
            await eventually(lambda: second.leads, seconds=5.0)  # at once: the first one gave the lease back
            second.want([_update(two)])
            await eventually(lambda: _status(api, "two") == _accepted("all well"))
        assert len(_writes(api)) == 2


async def test_what_is_there_already_is_not_written_and_what_others_wrote_stays(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POLICY_CRD)
        api.put(_picker_service("other"))
        theirs = _entry("their view", installation="other")
        done = api.put({**policy("done"), "status": _accepted("all well")})
        half = api.put({**policy("half"), "status": {"ancestors": [theirs, _entry("before")]}})
        async with _writing(api, "a") as writer:
            writer.want([_update(done), _update(half)])
            await eventually(lambda: bool(_writes(api)))
            assert _status(api, "half") == {"ancestors": [theirs, _entry()]}
            assert len(_writes(api)) == 1


def _picker_service(namespace: str) -> dict[str, Any]:
    metadata = {"name": "kvmesh-picker", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 9002}]}}


async def _entries(api: KubeApi, name: str, count: int) -> None:
    await eventually(lambda: len((_status(api, name) or {}).get("ancestors", ())) == count)


async def test_two_installations_write_beside_each_other_and_then_nothing_more(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POLICY_CRD)
        document, last = api.put(policy("p")), api.put(policy("last"))
        entries = {name: _entry(f"as {name} sees it", installation=name) for name in ("one", "two")}
        for name in entries:
            api.put(_picker_service(name))
        async with _writing(api, "a", lease="of-one") as one, _writing(api, "b", lease="of-two") as two:
            writers = {"one": one, "two": two}
            for count, (name, entry) in enumerate(entries.items(), 1):
                writers[name].want([replace(_update(document), entry=entry)])
                await _entries(api, "p", count)
            for count, (name, entry) in enumerate(entries.items(), 1):  # each has heard of the other's and looks again
                writers[name].want([replace(_update(each), entry=entry) for each in (document, last)])
                await _entries(api, "last", count)
        assert _status(api, "p") == _status(api, "last") == {"ancestors": list(entries.values())}
        assert len([path for path in _writes(api) if "/p/" in path]) == 2


async def test_the_entry_of_an_installation_that_is_gone_is_taken_out_and_one_that_may_be_there_stays(
    tmp_path: Path,
) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POLICY_CRD)
        api.put(_picker_service("living"))
        living, gone = (_entry(installation=name) for name in ("living", "gone"))
        document = api.put({**policy("p"), "status": {"ancestors": [gone, living]}})
        async with _writing(api, "a") as writer:
            writer.want([_update(document)])
            await eventually(lambda: _status(api, "p") == {"ancestors": [living, _entry()]})


async def test_a_status_that_is_full_of_others_is_left_as_it_is_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POLICY_CRD)
        names = [f"installation-{at}" for at in range(16)]
        for name in names:
            api.put(_picker_service(name))
        full = {"ancestors": [_entry(installation=name) for name in names]}
        document, last = api.put({**policy("full"), "status": full}), api.put(policy("last"))
        async with _writing(api, "a") as writer:
            writer.want([_update(document), _update(last)])
            await eventually(lambda: _status(api, "last") == _accepted("all well"))
        assert _status(api, "full") == full
        assert "entries of 16 installations" in caplog.text


async def test_a_judgement_of_an_older_spec_or_of_a_deleted_policy_is_not_written(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POLICY_CRD)
        old = _update(api.put(policy("changed")))
        api.put(policy("changed", failureMode="FailOpen"))
        gone = _update(api.put(policy("gone")))
        api.remove("InferencePolicy", "llm/gone")
        again = _update(api.put(policy("again")))
        api.remove("InferencePolicy", "llm/again")
        api.put(policy("again"))
        last = api.put(policy("last"))
        async with _writing(api, "a") as writer:
            writer.want([old, gone, again, _update(last)])
            await eventually(lambda: _status(api, "last") == _accepted("all well"))
            assert [_status(api, name) for name in ("changed", "again")] == [None, None]
            assert not writer.problems


async def test_conflicts_and_errors_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.documents.status_writer._RETRY_SECONDS", 0.1)
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POLICY_CRD)
        document = api.put(policy("p"))
        async with _writing(api, "a") as writer:
            await eventually(lambda: writer.leads)
            api.faults.fail(409, times=2, verb="update", plural="inferencepolicies")
            api.faults.fail(500, times=1, verb="get", plural="inferencepolicies")
            writer.want([_update(document)])
            await eventually(lambda: _status(api, "p") == _accepted("all well"))
            await eventually(lambda: not writer.problems)


async def test_without_the_right_to_write_it_is_said_and_nothing_else_happens(tmp_path: Path) -> None:
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POLICY_CRD)
        document = api.put(policy("p"))
        rules = [
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
            {"apiGroups": ["kvmesh.io"], "resources": ["inferencepolicies"], "verbs": ["get"]},
        ]
        async with _writing(api, "a", api.user("weak", rules)) as writer:
            writer.want([_update(document)])
            await eventually(lambda: bool(writer.problems))
            assert [problem.reason for problem in writer.problems] == ["status-unwritten"]
            assert "llm/p" in writer.problems[0].words


async def test_what_stays_wrong_is_said_once_and_shown_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvmesh.documents.status_writer._RETRY_SECONDS", 0.02)
    async with kube_api(tmp_path) as api:
        api.loose_crd(**POLICY_CRD)
        document = api.put(policy("p"))
        async with _writing(api, "a") as writer:
            await eventually(lambda: writer.leads)
            api.faults.fail(403, times=1000, verb="update", plural="inferencepolicies")
            writer.want([_update(document)])
            await eventually(lambda: bool(writer.problems))
            tries = len(_writes(api))
            shown = set()

            def tried_again() -> bool:
                shown.add(bool(writer.problems))
                return len(_writes(api)) > tries + 5

            await eventually(tried_again)
            assert shown == {True}
        assert [record.getMessage().count("status not written") for record in caplog.records].count(1) == 1


async def test_a_leader_that_cannot_renew_stops_before_another_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr("kvmesh.documents.status_writer.RENEW_WITHIN_SECONDS", 0.5)
    monkeypatch.setattr("kvmesh.documents.status_writer.LEASE_SECONDS", 2.0)
    async with kube_api(tmp_path) as api, _writing(api, "a") as first:
        await eventually(lambda: first.leads)
        lease = api.get(LEASE, "default/kvmesh-status-writer") or {}
        await api.go_down()
        await eventually(lambda: not first.leads, seconds=3.0)
        assert first.problems[0].reason == "status-unwritten"
        await api.come_up()
        await eventually(lambda: first.leads, seconds=5.0)
        after = api.get(LEASE, "default/kvmesh-status-writer") or {}
        assert after["spec"]["leaseTransitions"] == lease["spec"]["leaseTransitions"]

"""Documents from a folder that people and tools write into as they do."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmesh.documents import sources
from kvmesh.documents.documents import Document, Snapshot
from kvmesh.documents.pool_resolver import resolve_pools
from kvmesh.documents.sources import FolderSource
from tests.integration.kube_documents import following, names, pod, policy, pool


def _write(path: Path, *documents: dict[str, Any]) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(yaml.safe_dump_all(documents))
    fresh.replace(path)


def _refused(snapshot: Snapshot) -> list[tuple[str, str]]:
    return [(problem.reason, problem.where) for problem in snapshot.problems]


async def test_documents_of_a_folder_are_those_of_its_files_and_follow_them(tmp_path: Path) -> None:
    _write(tmp_path / "pool.yaml", pool(), pod("a", "10.0.0.1"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "more.json").write_text(json.dumps(pod("b", "10.0.0.2")))
    (tmp_path / "notes.txt").write_text("not: [read")
    async with following(FolderSource(tmp_path)) as told:
        snapshot = await told.until_pods("a", "b")
        assert snapshot.synced
        assert not snapshot.problems
        assert [each.address for each in resolve_pools(snapshot.documents).pools["llm/llama"].endpoints] == [
            "10.0.0.1:8000",
            "10.0.0.2:8000",
        ]
        (tmp_path / "sub" / "more.json").unlink()
        await told.until_pods("a", seconds=3.0)


async def test_a_change_is_told_within_a_second_and_the_rest_stays_the_same_object(tmp_path: Path) -> None:
    _write(tmp_path / "one.yaml", policy("one"))
    _write(tmp_path / "two.yaml", policy("two"))
    async with following(FolderSource(tmp_path)) as told:
        before = await told.until(lambda snapshot: len(snapshot.of("InferencePolicy")) == 2)
        _write(tmp_path / "two.yaml", policy("two", failureMode="FailOpen"))
        after = await told.until(
            lambda snapshot: snapshot.of("InferencePolicy")[1]["spec"] == {"failureMode": "FailOpen"}, seconds=2.0
        )
        assert after.of("InferencePolicy")[0] is before.of("InferencePolicy")[0]


async def test_a_file_gone_bad_keeps_its_documents_and_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "a.yaml", pod("a", "10.0.0.1"))
    async with following(FolderSource(tmp_path)) as told:
        before = (await told.until_pods("a")).of("Pod")
        (tmp_path / "a.yaml").write_text("kind: Pod\nmetadata: {name: [")
        snapshot = await told.until(lambda snapshot: bool(snapshot.problems))
        assert _refused(snapshot) == [("file-refused", str(tmp_path / "a.yaml"))]
        assert "line 3" in snapshot.problems[0].words
        assert snapshot.of("Pod") is before
        _write(tmp_path / "a.yaml", pod("b", "10.0.0.2"))
        assert not (await told.until_pods("b")).problems


async def test_an_emptied_file_keeps_its_documents_and_a_deleted_one_does_not(tmp_path: Path) -> None:
    _write(tmp_path / "a.yaml", pod("a", "10.0.0.1"))
    async with following(FolderSource(tmp_path)) as told:
        await told.until_pods("a")
        (tmp_path / "a.yaml").write_text("")
        snapshot = await told.until(lambda snapshot: bool(snapshot.problems))
        assert names(snapshot.of("Pod")) == ["a"]
        (tmp_path / "a.yaml").unlink()
        assert not (await told.until_pods()).problems


async def test_of_two_documents_of_one_name_the_first_file_counts(tmp_path: Path) -> None:
    _write(tmp_path / "a.yaml", pod("same", "10.0.0.1"))
    _write(tmp_path / "b.yaml", pod("same", "10.0.0.2"))
    async with following(FolderSource(tmp_path)) as told:
        snapshot = await told.until_pods("same")
        assert snapshot.of("Pod")[0]["status"]["podIP"] == "10.0.0.1"
        assert _refused(snapshot) == [("document-twice", str(tmp_path / "b.yaml"))]


async def test_a_folder_that_comes_later_goes_away_and_comes_back_keeps_what_was_known(tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    async with following(FolderSource(folder)) as told:
        folder.mkdir()
        _write(folder / "a.yaml", pod("a", "10.0.0.1"))
        await told.until_pods("a")
        folder.rename(tmp_path / "away")
        snapshot = await told.until(lambda snapshot: bool(snapshot.problems))
        assert _refused(snapshot) == [("folder-unreadable", str(folder))]
        assert names(snapshot.of("Pod")) == ["a"]
        (tmp_path / "away").rename(folder)
        await told.until(lambda snapshot: not snapshot.problems)
        assert told.pods() == ["a"]


async def test_a_mounted_config_map_is_followed_through_its_links(tmp_path: Path) -> None:
    for version, ip in (("..1", "10.0.0.1"), ("..2", "10.0.0.2")):
        (tmp_path / version).mkdir()
        _write(tmp_path / version / "a.yaml", pod("a", ip))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    async with following(FolderSource(tmp_path)) as told:
        await told.until(lambda snapshot: snapshot.of("Pod")[0]["status"]["podIP"] == "10.0.0.1")
        (tmp_path / "..new").symlink_to("..2")
        (tmp_path / "..new").replace(tmp_path / "..data")
        await told.until(lambda snapshot: snapshot.of("Pod")[0]["status"]["podIP"] == "10.0.0.2")
        assert not told.last.problems


async def test_neither_a_link_to_itself_nor_a_defect_met_in_one_file_ends_the_following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    _write(tmp_path / "a.yaml", pod("a", "10.0.0.1"))
    async with following(FolderSource(tmp_path)) as told:
        assert not (await told.until_pods("a")).problems

        def broken(*_: object, **__: object) -> tuple[Document, ...]:
            raise AttributeError("a defect")

        with monkeypatch.context() as broke:
            broke.setattr(sources, "read_documents", broken)
            _write(tmp_path / "a.yaml", pod("b", "10.0.0.1"))
            snapshot = await told.until(lambda snapshot: bool(snapshot.problems))
        assert names(snapshot.of("Pod")) == ["a"]
        _write(tmp_path / "a.yaml", pod("c", "10.0.0.1"))
        assert not (await told.until_pods("c")).problems

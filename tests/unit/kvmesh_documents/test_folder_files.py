"""Which files of a folder are read when, and whose documents count."""

from typing import Any

from kvmesh.documents.sources import FileStamp, FolderFiles


def _stamp(changed_at: int, size: int = 10) -> FileStamp:
    return FileStamp(changed_at, size, 1)


def _pod(name: str, ip: str = "10.0.0.1") -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "llm"}, "status": {"podIP": ip}}


def _names(files: FolderFiles) -> list[str]:
    return [key.name for key in files.documents()[0]]


def test_at_the_first_look_everything_is_read_at_once() -> None:
    files = FolderFiles()
    assert files.look({"b": _stamp(1), "a": _stamp(1)}) == ["a", "b"]


def test_later_a_file_is_read_when_it_looks_the_same_twice() -> None:
    files = FolderFiles()
    files.look({})
    assert files.look({"a": _stamp(1, 5)}) == []  # it may be half written
    assert files.look({"a": _stamp(2, 9)}) == []
    assert files.restless
    assert files.look({"a": _stamp(2, 9)}) == ["a"]
    files.read("a", (_pod("p"),))
    assert not files.restless
    assert files.look({"a": _stamp(2, 9)}) == []


def test_a_file_that_is_missing_once_keeps_its_documents() -> None:
    files = FolderFiles()
    files.look({"a": _stamp(1)})
    files.read("a", (_pod("p"),))
    files.look({})
    assert _names(files) == ["p"]
    files.look({})
    assert _names(files) == []


def test_a_refused_file_keeps_its_documents_until_it_is_good_again() -> None:
    files = FolderFiles()
    files.look({"a": _stamp(1)})
    files.read("a", (_pod("p"),))
    files.look({"a": _stamp(2)})
    assert files.look({"a": _stamp(2)}) == ["a"]
    files.refuse("a", "line 1: no")
    assert _names(files) == ["p"]
    assert [problem.words for problem in files.documents()[1]] == ["line 1: no"]
    assert files.look({"a": _stamp(2)}) == []  # the same file would be refused again
    files.look({"a": _stamp(3)})
    files.look({"a": _stamp(3)})
    files.read("a", (_pod("q"),))
    assert (_names(files), files.documents()[1]) == (["q"], ())


def test_a_document_that_reads_the_same_stays_the_same_object() -> None:
    files = FolderFiles()
    files.look({"a": _stamp(1)})
    before = _pod("p")
    files.read("a", (before, _pod("q")))
    files.read("a", (_pod("p"), _pod("q", "10.0.0.9")))
    found = {key.name: document for key, document in files.documents()[0].items()}
    assert found["p"] is before
    assert found["q"]["status"]["podIP"] == "10.0.0.9"

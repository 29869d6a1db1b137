"""What becomes of the answers of an API server, and how watches are asked for."""

from pathlib import Path

import httpx2
import pytest
from lightkube import ApiError, KubeConfig

from kvmesh.documents import kubernetes_client
from kvmesh.documents.cluster_config import ClusterConfig
from kvmesh.documents.document_kinds import POOL_KINDS
from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError
from kvmesh.documents.kubernetes_client import (
    Connection,
    Failure,
    failure_of,
    resource_class,
    status_class,
    watch_granted,
)

REQUEST = httpx2.Request("GET", "https://api/x")


def _status(code: int, headers: dict[str, str] | None = None) -> httpx2.Response:
    body = {"kind": "Status", "code": code, "reason": "Why", "message": "words"}
    return httpx2.Response(code, json=body, headers=headers, request=REQUEST)


def test_a_status_of_the_api_is_told_with_its_words_and_what_it_asks_to_wait() -> None:
    error = ApiError(request=REQUEST, response=_status(429, {"Retry-After": "7"}))
    assert failure_of(error) == Failure(code=429, message="429 Why: words", retry_after_seconds=7.0)


def test_an_answer_that_is_no_status_is_told_by_its_code() -> None:
    response = httpx2.Response(404, text="404 page not found", request=REQUEST)
    error = httpx2.HTTPStatusError("no", request=REQUEST, response=response)
    assert failure_of(error) == Failure(code=404, message="HTTP 404")


@pytest.mark.parametrize(
    ("error", "words"), [(httpx2.ConnectError("refused"), "ConnectError: refused"), (TimeoutError(), "TimeoutError")]
)
def test_what_is_no_answer_has_no_code(error: Exception, words: str) -> None:
    assert failure_of(error) == Failure(code=None, message=words)


def test_classes_of_documents_are_not_registered_so_that_others_may_have_their_own() -> None:
    from lightkube.resources.core_v1 import Pod

    kind = POOL_KINDS[0]
    assert resource_class(kind) is not resource_class(kind)
    assert resource_class(kind) is not Pod
    assert issubclass(status_class(kind), dict)


async def test_watches_ask_for_bookmarks_and_tell_when_they_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_client, "_WATCH_PACE_SECONDS", 0.0)
    asked: list[str] = []
    answers = iter([403, 200, 200])

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(str(request.url.query.decode()))
        return httpx2.Response(next(answers))

    granted: list[int] = []
    watch_granted.set(lambda: granted.append(len(asked)))
    login = KubeConfig.from_server("http://api").get()
    assert login is not None
    config = ClusterConfig(context="x", login=login, headers=(("User-Agent", "kvmesh/1"),))
    transport = kubernetes_client._WatchTransport(httpx2.MockTransport(answer), config)
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as client:
        await client.get("/api/v1/pods", params={"watch": "true"})
        await client.get("/api/v1/pods", params={"watch": "true", "resourceVersion": "7"})
        await client.get("/api/v1/pods", params={"limit": "500"})
    assert asked == [
        "watch=true&allowWatchBookmarks=true",
        "watch=true&resourceVersion=7&allowWatchBookmarks=true",
        "limit=500",
    ]
    assert granted == [2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[]",
        "clusters: []",
        "current-context: a",
        "current-context: a\ncontexts: []\nclusters: []\nusers: []",
        "{{{",
        "\x00",
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(KubernetesConfigError, match=r"kubeconfig|current-context|cannot reach a Kubernetes API"):
        Connection(ClusterAccess(kubeconfig=path))

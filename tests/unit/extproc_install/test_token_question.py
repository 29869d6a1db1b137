"""What an installation says of its pools' tokens: asked of a pod, or why nobody could be asked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from extproc.install.cluster import ForbiddenError
from extproc.install.objects import Document, Kind
from extproc.install.plan import PoolTarget
from extproc.install.token_question import INFERENCE_POOL, PodAnswer, token_lines
from tests.unit.extproc_install.sample_plans import plan

POOL = PoolTarget(namespace="llm", name="vllm", port=80, pod_port=8000)
TOKENS = PodAnswer(status=200, body=json.dumps({"count": 2, "tokens": [1, 2]}).encode())
RENDERED = PodAnswer(status=200, body=json.dumps([{"token_ids": [1, 2]}]).encode())
REFUSED, UNKNOWN = PodAnswer(status=403, body=b"{}"), PodAnswer(status=404, body=b"{}")
LATER = "`kvmesh policy explain llm/vllm` says what the pickers find, and `kvmesh doctor` (render) asks every pod"


def pod(name: str, *, ready: bool = True) -> Document:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {"kind": "Pod", "metadata": {"name": name, "labels": {"app": "vllm"}}, "status": {"conditions": conditions}}


@dataclass
class FakePods:
    """Pods behind an API server."""

    answers: Mapping[str, PodAnswer] = field(default_factory=dict)  # by path
    pods: Sequence[Document] = (pod("away", ready=False), pod("vllm-1"))
    has_service: bool = True
    forbidden: str = ""
    asked: list[str] = field(default_factory=list)

    def get(self, kind: Kind, name: str, namespace: str | None) -> Document | None:
        if kind == INFERENCE_POOL:
            return {"spec": {"selector": {"matchLabels": {"app": "vllm"}}}}
        return {"spec": {"selector": {"app": "vllm"}}} if self.has_service else None

    def labelled(self, kind: Kind, labels: Mapping[str, str], namespace: str | None = None) -> Sequence[Document]:
        if self.forbidden:
            raise ForbiddenError(self.forbidden)
        assert (kind.name, labels, namespace) == ("Pod", {"app": "vllm"}, "llm")
        return self.pods

    def ask_pod(self, namespace: str, name: str, port: int, path: str, *, post: bytes) -> PodAnswer:
        assert "prompt" in json.loads(post)
        self.asked.append(f"{namespace}/{name}:{port}{path}")
        return self.answers[path]


def said(pods: FakePods, **changes: Any) -> str:
    [line] = token_lines(pods, plan(pools=(POOL,), **changes))
    return line.removeprefix("tokens of pool llm/vllm: ")


def test_a_pod_that_tokenizes_is_named() -> None:
    pods = FakePods(answers={"/tokenize": TOKENS})
    assert said(pods) == "pod vllm-1 tells them at /tokenize"
    assert pods.asked == ["llm/vllm-1:8000/tokenize"]


def test_a_pod_that_only_renders_is_named_too() -> None:
    pods = FakePods(answers={"/tokenize": UNKNOWN, "/v1/completions/render": RENDERED}, has_service=False)
    assert said(pods) == "pod vllm-1 tells them at /v1/completions/render"


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (None, "it is routed on TEXT ONLY, which only predicts. Let its pods answer POST /tokenize or, with "),
        ("folders", "models without a folder in that claim are routed on TEXT ONLY, which only predicts. Let "),
    ],
)
def test_a_pod_that_tells_none_is_loud_and_says_what_to_do(claim: str | None, words: str) -> None:
    pods = FakePods(answers={"/tokenize": UNKNOWN, "/v1/completions/render": REFUSED})
    line = said(pods, tokenizers_claim=claim)
    assert line.startswith(
        f"pod vllm-1 tells none (/tokenize answers 404; /v1/completions/render answers 403): {words}"
    )
    assert line.endswith("put their folders into claim folders" if claim else "give folders by --tokenizers-claim")


@pytest.mark.parametrize(
    ("secret", "words"), [(None, "give the pickers one by --pod-key-secret"), ("vllm", "the pickers show theirs")]
)
def test_a_pod_that_wants_a_key_is_not_called_one_that_tells_none(secret: str | None, words: str) -> None:
    wants = PodAnswer(status=401, body=b'{"error":"Unauthorized"}')
    line = said(FakePods(answers={"/tokenize": wants, "/v1/completions/render": wants}), pod_key_secret=secret)
    assert line == (f"UNVERIFIED, pod vllm-1 wants a key, which is not sent through the API server: {words}. {LATER}")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"tokens": []}', b'{"tokens": "many"}', b"3"])
def test_an_answer_without_tokens_is_none(body: bytes) -> None:
    answer = PodAnswer(status=200, body=body)
    line = said(FakePods(answers={"/tokenize": answer, "/v1/completions/render": REFUSED}))
    assert "(/tokenize answers 200, without tokens; /v1/completions/render answers 403)" in line


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        (FakePods(pods=(pod("away", ready=False),)), "it has no pod that is ready yet"),
        (
            FakePods(forbidden="cannot list pods: forbidden"),
            "its pods cannot be looked for: cannot list pods: forbidden",
        ),
        (
            FakePods(answers={"/tokenize": PodAnswer(problem="the API server says: no")}),
            "pod vllm-1 cannot be asked from here: the API server says: no",
        ),
    ],
)
def test_what_cannot_be_asked_is_unverified_and_where_to_look_is_said(pods: FakePods, words: str) -> None:
    assert said(pods) == f"UNVERIFIED, {words}. {LATER}"

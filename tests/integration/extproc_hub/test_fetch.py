"""`kvmesh models fetch` from a hub that speaks the real protocol, also where it fails."""

import hashlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from extproc.hub import fetch as fetching
from extproc.hub import hub as hubs
from extproc.hub import kept_folder
from extproc.hub.commands import app
from extproc.hub.kept_folder import RECORD, read_record
from extproc.models.learned_models import learned_models
from extproc.models.models import TokensFrom
from extproc.pods.endpoint import EndpointModels
from tests.integration.hub_server import (
    HubState,
    cut_off,
    hub_server,
    moved,
    other_content,
    status,
    times,
    trickle,
    web_page,
)
from tests.kube_api.certificates import make_server_certificate

TOKENIZER = b'{"model": "' + b"x" * 2000 + b'"}'  # large: it is on the CDN
FILES = {
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
    "config.json": b'{"model_type": "llama"}',
    "additional_chat_templates/tool_use.jinja": b"{{ messages }}",
    "model.safetensors": b"w" * 5000,
    "modeling_own.py": b"raise SystemExit",
    "README.md": b"# A model",
}
KEPT = sorted([*(name for name in FILES if name.endswith((".json", ".jinja"))), RECORD])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubState]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(fetching, "BACKOFF_SECONDS", 0.01)
    with hub_server() as state:
        monkeypatch.setenv("HF_ENDPOINT", state.endpoint)
        state.repository("org/llama", FILES)
        yield state


def call(cache: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", "fetch", *arguments, f"--tokenizers={cache}"])


def told(cache: Path, *arguments: str) -> dict[str, Any]:
    """Return what becomes of one model."""
    done = call(cache, *arguments, "--json")
    [found] = json.loads(done.stdout)
    assert done.exit_code == (1 if found["outcome"] == "failed" else 0), done.output
    return dict(found)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_tokenizers_files_come_and_nothing_else(hub: HubState, tmp_path: Path) -> None:
    done = call(tmp_path, "org/llama")
    commit = hub.repositories["org/llama"].refs["main"]
    assert (done.exit_code, done.output) == (0, f"fetched org/llama (org/llama at {commit[:12]})\n")
    folder = tmp_path / "org" / "llama"
    assert files(folder) == KEPT
    assert (folder / "tokenizer.json").read_bytes() == TOKENIZER
    assert {path.stat().st_mode & 0o444 for path in folder.rglob("*")} == {0o444}, "other users read it"
    assert not [path for path in hub.asked("hub") if "model.safetensors" in path or path.endswith(".py")]


def test_a_picker_finds_what_was_fetched_under_the_name_that_pods_serve(hub: HubState, tmp_path: Path) -> None:
    assert told(tmp_path, "chat=org/llama")["outcome"] == "fetched"
    [model] = learned_models([EndpointModels(first="chat", models=frozenset({"chat"}), adapters={})], folders=tmp_path)
    assert (model.tokens_from, model.tokenizer_folder) == (TokensFrom.TOKENIZER, tmp_path / "chat")


def test_the_token_goes_to_the_hub_and_not_to_the_cdn(hub: HubState, tmp_path: Path) -> None:
    hub.repositories["org/llama"].gated = True
    secret = tmp_path / "token"
    secret.write_text(f"{hub.token}\n")
    assert told(tmp_path / "cache", "org/llama", f"--hub-token-file={secret}")["outcome"] == "fetched"
    assert {each.token for each in hub.requests if each.place == "hub"} == {hub.token}
    assert {each.token for each in hub.requests if each.place == "cdn"} == {None}


def test_the_token_does_not_follow_to_another_host(
    hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.faults.append(moved)
    assert told(tmp_path, "org/llama")["outcome"] == "fetched"
    elsewhere = [each for each in hub.requests if each.place == "cdn"]
    assert "/api/models/org/llama" in {each.path for each in elsewhere}
    assert {each.token for each in elsewhere} == {None}


def test_a_whole_folder_is_kept_without_asking_the_hub(hub: HubState, tmp_path: Path) -> None:
    told(tmp_path, "org/llama")
    hub.repositories["org/llama"].commit({"tokenizer.json": b"{}"})
    hub.requests.clear()
    assert told(tmp_path, "org/llama")["outcome"] == "kept"
    assert hub.requests == []


def test_a_branch_is_followed_where_that_is_asked_for(hub: HubState, tmp_path: Path) -> None:
    first = told(tmp_path, "org/llama")["fetched"]["commit"]
    assert told(tmp_path, "org/llama", "--renew")["outcome"] == "kept"
    second = hub.repositories["org/llama"].commit({"tokenizer.json": b"{}"})
    found = told(tmp_path, "org/llama", "--renew")
    assert (found["outcome"], found["fetched"]["commit"]) == ("fetched", second)
    assert first != second
    assert files(tmp_path / "org" / "llama") == sorted([RECORD, "tokenizer.json"])


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: HubState, tmp_path: Path) -> None:
    repository = hub.repositories["org/llama"]
    first = repository.refs["main"]
    tagged = repository.commit({"tokenizer.json": b"{}"}, branch="v1.0")
    for written, commit in (("v1.0", tagged), (first, first)):
        found = told(tmp_path, f"org/llama@{written}")
        assert (found["outcome"], found["fetched"]["commit"]) == ("fetched", commit)


@pytest.mark.parametrize("how", ["truncated", "changed", "gone"])
def test_a_damaged_folder_is_fetched_again_at_its_commit(hub: HubState, tmp_path: Path, how: str) -> None:
    commit = told(tmp_path, "org/llama")["fetched"]["commit"]
    file = tmp_path / "org" / "llama" / "tokenizer.json"
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(TOKENIZER[:100] if how == "truncated" else TOKENIZER[::-1])
    hub.repositories["org/llama"].commit({"tokenizer.json": b"{}"})
    listed = CliRunner().invoke(app, ["models", "list", str(tmp_path)])
    assert listed.exit_code == 1
    assert "damaged; tokenizer.json" in listed.output
    found = told(tmp_path, "org/llama")
    assert (found["outcome"], found["fetched"]["commit"]) == ("mended", commit)
    assert file.read_bytes() == TOKENIZER


def test_a_damaged_folder_is_said_where_no_hub_is_asked(hub: HubState, tmp_path: Path) -> None:
    told(tmp_path, "org/llama")
    (tmp_path / "org" / "llama" / "tokenizer.json").write_bytes(b"")
    found = told(tmp_path, "org/llama", "--offline")
    assert (found["outcome"], found["reason"]) == ("failed", f"tokenizer.json has 0 of {len(TOKENIZER)} bytes")


def test_offline_keeps_what_is_there_and_says_what_is_not(
    hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(tmp_path, "org/llama")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert told(tmp_path, "org/llama", "--renew")["outcome"] == "kept"
    assert "it is not in the cache" in told(tmp_path, "org/other")["reason"]
    assert hub.requests == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gated": True}, "it is gated: accept its terms on the hub, and give a token"),
        ({"private": True}, "there is no such model, or it needs a token (HF_TOKEN, --hub-token-file)"),
    ],
)
def test_a_model_that_is_not_for_all_says_what_to_do(
    hub: HubState, tmp_path: Path, change: dict[str, bool], words: str
) -> None:
    for name, value in change.items():
        setattr(hub.repositories["org/llama"], name, value)
    assert words in told(tmp_path, "org/llama")["reason"]
    assert list(tmp_path.glob("org/*")) == []


def test_a_wrong_token_is_named(hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    found = told(tmp_path, "org/llama")
    assert "answers 401: is the token right, and" in found["reason"]
    assert "hf_wrong" not in json.dumps(found)


def test_models_and_revisions_that_are_not_there(
    hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert "does not have it: is the token right" in told(tmp_path, "org/none")["reason"]
    assert "no such branch, tag or commit" in told(tmp_path, "org/llama@v9")["reason"]
    hub.repository("org/weights", {"model.safetensors": b""})
    assert "has none of tokenizer.json" in told(tmp_path, "org/weights")["reason"]


@pytest.mark.parametrize("fault", [cut_off, other_content])
def test_a_file_that_arrives_otherwise_is_tried_again(hub: HubState, tmp_path: Path, fault: Any) -> None:
    hub.faults.append(times(1, fault, where=hashed(TOKENIZER)))
    assert told(tmp_path, "org/llama")["outcome"] == "fetched"
    assert (tmp_path / "org" / "llama" / "tokenizer.json").read_bytes() == TOKENIZER


def test_a_file_that_never_is_what_the_hub_says_leaves_nothing(hub: HubState, tmp_path: Path) -> None:
    hub.faults.append(times(99, other_content, where=hashed(TOKENIZER)))
    found = told(tmp_path, "org/llama")
    assert "tokenizer.json arrived with another checksum" in found["reason"]
    assert len(hub.asked("cdn")) == fetching.TRIES
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"x" * 3000, "tokenizer.json arrived as no JSON"), (TOKENIZER[:1500], "tokenizer.json arrived as no JSON")],
)
def test_a_mirror_that_says_no_checksums_must_send_json(
    hub: HubState, tmp_path: Path, content: bytes, words: str
) -> None:
    hub.describes_files = False
    assert told(tmp_path, "org/llama")["outcome"] == "fetched"
    hub.repository("org/cut", FILES | {"tokenizer.json": content})
    assert words in told(tmp_path, "org/cut")["reason"]


def test_a_file_without_end_does_not_fill_the_volume(
    hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs, "MOST_FILE_BYTES", 1000)
    hub.describes_files = False
    assert told(tmp_path, "org/llama")["reason"] == f"it cannot be kept in {tmp_path}: File too large"
    assert files(tmp_path) == []
    assert len(hub.asked("cdn")) == 1, "nothing is tried again where the disk refuses"
    hub.describes_files = True
    assert "has 2013 bytes: no tokenizer has that many" in told(tmp_path, "org/llama")["reason"]


def test_a_model_with_countless_files_is_refused(hub: HubState, tmp_path: Path) -> None:
    hub.repository("org/many", FILES | {f"additional_chat_templates/t{i}.jinja": b"" for i in range(64)})
    assert "no model has more than 64" in told(tmp_path, "org/many")["reason"]


def test_a_page_of_a_proxy_is_no_answer_of_a_hub(hub: HubState, tmp_path: Path) -> None:
    hub.faults.append(times(9, web_page, where="/api/models"))
    assert "does not answer as a Hugging Face hub or a mirror does" in told(tmp_path, "org/llama")["reason"]
    assert len(hub.requests) == 1


def test_a_commit_that_is_gone_says_how_to_go_on(hub: HubState, tmp_path: Path) -> None:
    told(tmp_path, "org/llama")
    hub.repositories["org/llama"].commits.clear()
    hub.repository("org/llama", {"tokenizer.json": b"{}"}).commits["f" * 40] = {"tokenizer.json": b"{}"}
    hub.repositories["org/llama"].refs["main"] = "f" * 40
    del hub.repositories["org/llama"].commits[f"{1:040x}"]
    (tmp_path / "org" / "llama" / "tokenizer.json").unlink()
    assert "its history was changed: --renew takes" in told(tmp_path, "org/llama")["reason"]
    assert told(tmp_path, "org/llama", "--renew")["outcome"] == "mended"


def test_one_that_is_ended_leaves_nothing(hub: HubState, tmp_path: Path) -> None:
    has_begun = threading.Event()

    def without_end(handler: Any) -> bool:
        has_begun.set()
        return trickle(handler)

    hub.faults.append(times(999, without_end, where=hashed(TOKENIZER)))
    command = [
        str(Path(sys.executable).with_name("kvmesh")),
        "models",
        "fetch",
        "org/llama",
        f"--tokenizers={tmp_path}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert has_begun.wait(timeout=30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert files(tmp_path) == []


def test_a_defect_does_not_keep_a_picker_from_starting(
    hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "new_folder", lambda *_: 1 / 0)
    done = call(tmp_path, "org/llama", "--best-effort")
    assert done.exit_code == 0
    assert "failed org/llama: ZeroDivisionError" in done.output


def test_a_folder_in_another_models_folder_is_refused(hub: HubState, tmp_path: Path) -> None:
    told(tmp_path, "chat=org/llama")
    assert "would be in another model's folder" in told(tmp_path, "chat/b=org/llama")["reason"]


def test_a_failure_leaves_what_was_there(hub: HubState, tmp_path: Path) -> None:
    told(tmp_path, "org/llama")
    hub.faults.append(times(99, status(410), where="/api/models"))
    found = told(tmp_path, "org/llama@v2")
    assert (found["outcome"], "answers 410" in found["reason"]) == ("failed", True)
    assert files(tmp_path / "org" / "llama") == KEPT


def test_a_hub_that_is_away_for_a_moment_is_asked_again(hub: HubState, tmp_path: Path) -> None:
    hub.faults.append(times(2, status(503), where="/api/models"))
    assert told(tmp_path, "org/llama")["outcome"] == "fetched"


@pytest.mark.parametrize(
    "fault",
    [
        times(999, trickle, where="tokenizer.json"),
        times(999, status(429, Retry_After="86400"), where="/resolve/"),
    ],
    ids=["trickles", "asks to wait a day"],
)
def test_a_hub_that_is_too_slow_is_given_up(hub: HubState, tmp_path: Path, fault: Any) -> None:
    hub.faults.append(fault)
    found = told(tmp_path, "org/llama", "--timeout-seconds=1.5")
    assert "not done after 1.5 s: the hub is too slow" in found["reason"]
    assert files(tmp_path) == []


def test_a_hub_that_nobody_is_at(tmp_path: Path, hub: HubState) -> None:
    found = told(tmp_path, "org/llama", "--hub-endpoint=http://127.0.0.1:1")
    assert "http://127.0.0.1:1 cannot be reached" in found["reason"]


def test_best_effort_says_what_failed_and_ends_well(hub: HubState, tmp_path: Path) -> None:
    summary = tmp_path / "termination-log"
    done = call(tmp_path / "cache", "org/none", "org/llama", "--best-effort", f"--summary-file={summary}")
    assert done.exit_code == 0
    first, second = summary.read_text().splitlines()
    assert first.startswith("failed org/none: org/none: ")
    assert second.startswith("fetched org/llama")


def test_a_certificate_that_is_not_trusted(hub: HubState, tmp_path: Path) -> None:
    made = make_server_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.cert, made.key)
    command = [str(Path(sys.executable).with_name("kvmesh")), "models", "fetch", "org/llama"]
    with hub_server(tls=context) as state:
        state.repository("org/llama", FILES)
        environment = os.environ | {"HF_ENDPOINT": state.endpoint}
        command.append(f"--tokenizers={tmp_path / 'cache'}")
        refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert refused.returncode == 1
        assert "is not trusted: name its authority by SSL_CERT_FILE" in refused.stderr
        environment["SSL_CERT_FILE"] = str(made.authority)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_replicas_may_fetch_into_one_cache_at_once(hub: HubState, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("kvmesh")),
        "models",
        "fetch",
        "org/llama",
        f"--tokenizers={tmp_path}",
    ]
    replicas = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[0] for process in replicas]
    assert [process.returncode for process in replicas] == [0, 0, 0], said
    assert CliRunner().invoke(app, ["models", "list", str(tmp_path)]).output.endswith(": whole\n")


def test_what_nobody_links_to_goes_once_it_is_old(
    hub: HubState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(tmp_path, "org/llama")
    first = (tmp_path / "org" / "llama").resolve()
    hub.repositories["org/llama"].commit(FILES)
    told(tmp_path, "org/llama", "--renew")
    assert first.is_dir(), "a picker may be reading it"
    monkeypatch.setattr(kept_folder, "FRESH_SECONDS", -1.0)
    hub.repositories["org/llama"].commit(FILES)
    told(tmp_path, "org/llama", "--renew")
    assert [each for each in (tmp_path / "org").iterdir() if not each.is_symlink()] == [
        (tmp_path / "org" / "llama").resolve()
    ]


def test_a_folder_of_somebody_else_is_left_alone(hub: HubState, tmp_path: Path) -> None:
    own = tmp_path / "org" / "llama"
    own.mkdir(parents=True)
    (own / "tokenizer.json").write_bytes(b"{}")
    assert "was not fetched by kvmesh" in told(tmp_path, "org/llama")["reason"]
    assert files(tmp_path) == ["org/llama/tokenizer.json"]
    listed = CliRunner().invoke(app, ["models", "list", str(tmp_path)])
    assert (listed.exit_code, listed.output) == (0, "org/llama: not fetched by kvmesh: not checked\n")


def test_a_cache_that_cannot_be_written(hub: HubState, tmp_path: Path) -> None:
    (tmp_path / "org").write_text("a file")
    assert "cannot be made" in told(tmp_path, "org/llama")["reason"]


def test_a_record_says_what_was_fetched(hub: HubState, tmp_path: Path) -> None:
    told(tmp_path, "org/llama@main")
    record = read_record(tmp_path / "org" / "llama")
    assert record is not None
    assert (record.repository, record.revision, record.endpoint) == ("org/llama", "main", hub.endpoint)
    assert sorted(record.files) == [name for name in KEPT if name != RECORD]
    shutil.copytree(tmp_path / "org" / "llama", tmp_path / "copy")
    assert kept_folder.damage(tmp_path / "copy", record) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("../x",),
        ("org/llama", "--hub-endpoint=ftp://hub"),
        ("org/llama", "--hub-endpoint=https://[hub"),
        ("org/llama", "--hub-endpoint=https://me:hf_secret@hub"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("kvmesh")), "models", "fetch", *arguments, f"--tokenizers={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "kvmesh: " in done.stderr
    assert "hf_secret" not in done.stderr


def hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

"""transformers loads a folder in a process of its own: what it makes of it counts, and its failures are said."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import TokenizerError
from extproc.prompts import tokenizer_folder
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.prompts.tokenizer_folder import load_as_transformers
from extproc.requests.openai import parse_request
from extproc.requests.request import ChatPrompt

TINY_MODEL = Path(__file__).parents[3] / "podsim" / "tiny_model"
DEADLINE_SECONDS = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model's tokenizer as that of a Llama whose class transformers builds anew."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODEL / name, tmp_path / name)
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def complete(tokenizer: ModelTokenizer, text: str) -> list[int]:
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    (buffer,) = tokenizer.token_buffers(parse_request(path="/v1/completions", body=body))
    return list(array("I", buffer))


def test_a_class_that_is_built_anew_makes_other_tokens_than_the_file_says(folder: Path) -> None:
    built, written = ModelTokenizer.load(folder), ModelTokenizer.load(folder, as_written=True)
    # LlamaTokenizer writes ▁ for a space and one before the text, which this vocabulary has no token for
    assert complete(built, "Hello there") != complete(written, "Hello there")
    assert complete(written, "Hello there") == complete(ModelTokenizer.load(TINY_MODEL), "Hello there")
    hello = ChatPrompt(messages=({"role": "user", "content": "Hello"},))
    assert built.render(hello) == written.render(hello)


def test_special_tokens_that_only_a_list_names_are_added(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", extra_special_tokens=["<|more|>"])
    vocabulary = 4096
    assert complete(ModelTokenizer.load(folder), "<|more|>") == [vocabulary]


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "voc', "JSONDecodeError: Unterminated"),
        ("tokenizer.json", "{}", "transformers cannot load"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_it_and_the_cause(
    folder: Path, name: str, content: str, cause: str
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=cause) as raised:
        ModelTokenizer.load(folder)
    assert str(folder) in str(raised.value)


def test_code_of_the_folder_is_never_run(folder: Path) -> None:
    witness = folder / "it_ran"
    (folder / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Evil: pass\n")
    edit(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}))
    with pytest.raises(TokenizerError, match="trust_remote_code"):
        ModelTokenizer.load(folder)
    assert not witness.exists()


def test_code_that_vllm_leaves_aside_or_transformers_has_itself_is_no_reason_to_refuse(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = {"AutoTokenizer": ["theirs.Theirs", None]}
    edit(folder / "tokenizer_config.json", tokenizer_class="Theirs", auto_map=code)
    (folder / "config.json").write_text(json.dumps({"model_type": "internlm2"}))
    assert complete(ModelTokenizer.load(folder), "Hello") == complete(ModelTokenizer.load(TINY_MODEL), "Hello")
    assert caplog.records == []  # pods with --trust-remote-code do not run it either
    edit(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with caplog.at_level(logging.WARNING):
        assert ModelTokenizer.load(folder)
    assert "never run" in caplog.records[0].getMessage()


def test_a_module_in_the_working_directory_shadows_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "transformers.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(folder)
    assert load_as_transformers(Path(), "it is a test").special_tokens["bos_token"] == "<|bos|>"


def test_a_process_that_takes_too_long_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_folder, "DEADLINE_SECONDS", 0.05)
    with pytest.raises(TokenizerError, match="it takes longer than"):
        ModelTokenizer.load(folder)


def test_its_memory_is_bounded() -> None:
    program = (
        "from extproc.prompts import transformers_program as p; p.limit_resources(); bytearray(p.MOST_ADDRESS_BYTES)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip().endswith("MemoryError")


def test_it_dies_with_its_parent(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # nobody writes: it waits here for ever
    program = (
        "from pathlib import Path; from extproc.prompts.tokenizer_folder import load_as_transformers;"
        f"load_as_transformers(Path({str(folder)!r}), 'it is a test')"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    held = None
    try:
        until = time.monotonic() + DEADLINE_SECONDS
        while held is None and time.monotonic() < until:
            try:
                held = os.open(folder / "config.json", os.O_WRONLY | os.O_NONBLOCK)  # fails without a reader
            except OSError:
                time.sleep(0.05)
        assert held is not None
        (child,) = (int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        while is_alive(child) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_alive(child)
    finally:
        parent.kill()
        parent.wait()
        if held is not None:
            os.close(held)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

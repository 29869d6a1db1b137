"""The folders of twelve real models make the same tokens here as in vLLM: texts, chats, tools, switches of thinking."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.real_folders import REAL_FOLDERS, FolderUnavailableError
from extproc.prompts.tokenizer_folder import MODEL_TYPES_WITH_OWN_CLASS
from extproc.prompts.transformers_program import AS_WRITTEN_IN_VLLM
from tests.required_programs import lacks
from tests.vllm.environment import VllmEnvironment, offline, run
from tests.vllm.folder_comparison import Oracle, compare, running_oracle
from tests.vllm.sentencepiece_folder import make_folder

SENTENCEPIECE = "sentencepiece"
# where the fast library cannot load what transformers builds; docs/evidence/tokenizers.md names them, too
ON_THE_SLOW_LIBRARY = {"gpt4o", SENTENCEPIECE}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {SENTENCEPIECE: make_folder(tmp_path_factory.mktemp("made") / SENTENCEPIECE)}
    try:
        return {name: folder.ensure() for name, folder in REAL_FOLDERS.items()} | made
    except FolderUnavailableError as error:
        lacks(f"the folders of real models cannot be had: {error}")


@pytest.fixture(scope="module")
def oracle(
    vllm_environment: VllmEnvironment, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Oracle]:
    with running_oracle(vllm_environment, folders, tmp_path_factory.mktemp("folders")) as running:
        yield running


@pytest.mark.parametrize("name", [*REAL_FOLDERS, SENTENCEPIECE])
def test_every_text_and_chat_has_vllms_tokens(name: str, folders: dict[str, Path], oracle: Oracle) -> None:
    found = compare(name, folders[name], oracle)
    assert (found.different, found.left) == ([], 0)
    assert found.texts > 100
    assert found.chats > 100
    assert (found.engine == "tokenizers") == (name in ON_THE_SLOW_LIBRARY)


@pytest.mark.parametrize("name", ["yi", "gpt4o"])
def test_what_the_file_alone_says_is_not_what_vllm_makes_of_these(
    name: str, folders: dict[str, Path], oracle: Oracle
) -> None:
    assert len(compare(name, folders[name], oracle, as_written=True).different) > 100


def test_the_exceptions_to_a_folders_class_are_those_of_vllm_and_its_transformers(
    vllm_environment: VllmEnvironment,
) -> None:
    program = """
from transformers.models.auto import tokenization_auto as auto
from vllm.tokenizers import registry
plain = {"TokenizersBackend", "MistralCommonBackend", None}
names = auto.TOKENIZER_MAPPING_NAMES
own = [kind for kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS if names.get(kind) not in plain]
print("ANSWER", *sorted(own), "|", *sorted(registry._MODEL_TYPES_WITH_INCORRECT_TOKENIZER_CLASS))
"""
    said = run([str(vllm_environment.python), "-c", program], env=offline(), deadline_seconds=180.0)
    (line,) = (line for line in said.splitlines() if line.startswith("ANSWER"))
    own, _, written = line.removeprefix("ANSWER ").partition(" | ")
    assert set(own.split()) == MODEL_TYPES_WITH_OWN_CLASS
    assert set(written.split()) == AS_WRITTEN_IN_VLLM

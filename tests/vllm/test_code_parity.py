"""What other libraries than transformers read and render has vLLM's tokens: Mistral's files, and gpt-oss's chats.

Which models' chats vLLM renders in code is compared with its source.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.real_folders import FolderUnavailableError
from extproc.prompts.chats_in_code import HARMONY_MODEL_TYPE, MODES_BY_ARCHITECTURE
from tests.required_programs import lacks
from tests.vllm.environment import VllmEnvironment, offline, run
from tests.vllm.folder_comparison import Oracle, asked_without_templates, compare, running_oracle
from tests.vllm.library_folders import GPT_OSS, library_folders
from tests.vllm.mistral_folders import MISTRAL_FOLDERS

# `--tokenizer-mode` of vLLM 0.32: what comes by itself is in MODES_BY_ARCHITECTURE, mistral-common has its own files
OTHER_MODES = {"hf", "mistral", "cohere"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    try:
        return library_folders(tmp_path_factory.mktemp("libraries"))
    except FolderUnavailableError as error:
        lacks(f"the vocabulary of gpt-oss cannot be had: {error}")


@pytest.fixture(scope="module")
def oracle(
    vllm_environment: VllmEnvironment, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Oracle]:
    scratch = tmp_path_factory.mktemp("answers")
    with running_oracle(vllm_environment, folders, scratch, asked=asked_without_templates) as running:
        yield running


@pytest.mark.parametrize("name", MISTRAL_FOLDERS)
def test_mistrals_files_have_vllms_tokens(name: str, folders: dict[str, Path], oracle: Oracle) -> None:
    found = compare(name, folders[name], oracle, asked=asked_without_templates)
    assert (found.different, found.left) == ([], 0)
    assert found.texts > 100
    assert found.chats > 200
    assert found.engine == "mistral-common"


@pytest.mark.parametrize("name", GPT_OSS)
def test_chats_of_gpt_oss_have_vllms_tokens(name: str, folders: dict[str, Path], oracle: Oracle) -> None:
    found = compare(name, folders[name], oracle, asked=asked_without_templates)
    assert found.different == []
    assert found.engine == "fastokens"
    assert found.chats > 500
    assert found.left < found.chats / 10  # parts that are no text


def source(environment: VllmEnvironment, module: str) -> ast.Module:
    program = (
        f"import importlib.util as u; print('FILE', u.find_spec('vllm').submodule_search_locations[0] + '/{module}')"
    )
    said = run([str(environment.python), "-c", program], env=offline(), deadline_seconds=60.0)
    (line,) = (line for line in said.splitlines() if line.startswith("FILE "))
    return ast.parse(Path(line.removeprefix("FILE ")).read_text())


def test_the_models_whose_chats_are_rendered_in_code_are_those_of_vllm(vllm_environment: VllmEnvironment) -> None:
    """In vllm/config/model.py, `arch == NAME` or `arch in (NAMES)` stands before `self.tokenizer_mode = MODE`."""
    found: dict[str, str] = {}
    for branch in ast.walk(source(vllm_environment, "config/model.py")):
        if (
            isinstance(branch, ast.If)
            and isinstance(branch.test, ast.Compare)
            and isinstance(branch.test.left, ast.Name)
        ):
            (given,) = branch.test.comparators
            set_here = [step for step in branch.body if isinstance(step, ast.Assign)]
            modes = [step.value for step in set_here if ast.unparse(step.targets[0]) == "self.tokenizer_mode"]
            if branch.test.left.id == "arch" and modes:
                names = ast.literal_eval(given)
                for name in (names,) if isinstance(names, str) else names:
                    found[name] = ast.literal_eval(modes[0])
    assert found == MODES_BY_ARCHITECTURE


def test_no_other_renderer_or_tokenizer_is_in_vllm(vllm_environment: VllmEnvironment) -> None:
    tree = source(vllm_environment, "tokenizers/registry.py")
    (modes,) = (
        {key.value for key in step.value.keys if isinstance(key, ast.Constant)}
        for step in tree.body
        if isinstance(step, ast.Assign) and ast.unparse(step.targets[0]) == "_VLLM_TOKENIZERS"
        if isinstance(step.value, ast.Dict)
    )
    assert modes == OTHER_MODES | set(MODES_BY_ARCHITECTURE.values())


def test_harmony_goes_by_the_model_type(vllm_environment: VllmEnvironment) -> None:
    text = ast.unparse(source(vllm_environment, "renderers/online_renderer.py"))
    assert f"self.use_harmony = model_config.hf_config.model_type == '{HARMONY_MODEL_TYPE}'" in text

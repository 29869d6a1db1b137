"""Fixtures for tests against real vLLM servers; `make test-vllm` runs this folder.

    vllm_environment   the cached environment with vLLM in it (built on first use, about four minutes)
    tiny_model         a folder with random weights and the tokenizer of `podsim/tiny_model`
    vllm_pods          two running servers (about 20 s for both), healthy and with empty caches at the session's start
    fresh_vllm_pods    a function that starts more servers for one test and ends them with it: for tests that kill pods

A pod has `address`, `url`, `get`, `get_text`, `post`, `kill`, `log`; see `servers.VllmPod`. The pods of `vllm_pods`
live through the whole session, so a test must not rely on an empty cache: send a prompt nobody sent before.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.vllm.environment import VllmEnvironment, ensure_environment, ensure_model
from tests.vllm.servers import VllmPod, running_pods

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
TOKENIZER = REPOSITORY / "podsim" / "tiny_model"
TEST_SECONDS = 900.0  # the first test starts two servers, and a start has 360 s


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder more time than others have."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="session")
def vllm_environment() -> VllmEnvironment:
    return ensure_environment()


@pytest.fixture(scope="session")
def tiny_model(vllm_environment: VllmEnvironment) -> Path:
    return ensure_model(vllm_environment, tokenizer=TOKENIZER)


@pytest.fixture(scope="session")
def vllm_pods(
    vllm_environment: VllmEnvironment, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmPod, ...]]:
    logs = tmp_path_factory.mktemp("vllm")
    with running_pods(2, environment=vllm_environment, model_folder=tiny_model, logs=logs) as pods:
        yield pods


@pytest.fixture
def fresh_vllm_pods(
    vllm_environment: VllmEnvironment, tiny_model: Path, tmp_path: Path
) -> Iterator[Callable[..., tuple[VllmPod, ...]]]:
    """Call it with a count, and addresses where they matter; memory allows one or two beside the session's pods."""
    with contextlib.ExitStack() as stack:
        started = 0

        def start(count: int, addresses: Sequence[str] = ()) -> tuple[VllmPod, ...]:
            nonlocal started
            started += 1
            return stack.enter_context(
                running_pods(
                    count,
                    environment=vllm_environment,
                    model_folder=tiny_model,
                    logs=tmp_path / str(started),
                    addresses=addresses,
                )
            )

        yield start

"""What holds for every unit test: a random order with a seed, and an environment that it leaves as it was."""

import os
from collections.abc import Iterator

import pytest

OF_PYTEST = frozenset({"PYTEST_CURRENT_TEST"})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how to have the same order again: quiet as the tests are, the plugin's own line is not shown."""
    if getattr(config.option, "randomly_reorganize", False):
        terminalreporter.write_line(f"in random order: --randomly-seed={config.option.randomly_seed}")


@pytest.fixture(autouse=True)
def _environment_as_it_was() -> Iterator[None]:
    """Fail a test that leaves a variable behind, in the test or in the code: the next tests would read it."""
    before = dict(os.environ)
    yield
    changed = {name for name in {*before, *os.environ} - OF_PYTEST if before.get(name) != os.environ.get(name)}
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"left changed in the environment: {', '.join(sorted(changed))}"

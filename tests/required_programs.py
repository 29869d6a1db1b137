"""What a test does where something that it needs is not here: it is skipped, and fails where all has to be here."""

import os
from typing import NoReturn

import pytest


def lacks(words: str) -> NoReturn:
    """Skip the test, or fail it where programs are demanded (KVMESH_REQUIRE_PROGRAMS=1, as CI has it)."""
    if os.environ.get("KVMESH_REQUIRE_PROGRAMS") == "1":
        pytest.fail(words)
    pytest.skip(words)

"""One mesh for the tests that leave it as they found it; tests that break things start their own."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.stack import Stack, running_stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A mesh with three simulated pods, a small body limit and two listed models."""
    settings = "max_body_bytes: 200000\npolicy: {models: {served: [{name: other}], onlyListed: true}}\n"
    async with running_stack(tmp_path_factory.mktemp("stack"), settings=settings) as running:
        yield running

"""A pool is written the same for every command, so that one settings file serves all."""

import pytest

from extproc.errors import ConfigError
from extproc.pools.pool_hosts import pool_name
from operate.install.parse_targets import parse_pools
from operate.options import only_pool


@pytest.mark.parametrize("text", ["llm/vllm", "llm/vllm:8000", "llm/vllm:8000:8001"])
def test_what_installs_a_pool_also_names_it(text: str) -> None:
    [target] = parse_pools([text])
    assert pool_name(text) == f"{target.namespace}/{target.name}" == "llm/vllm"


@pytest.mark.parametrize("text", ["", "vllm", "/vllm", "llm/", "a/b/c", ":8000"])
def test_what_names_no_pool_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not NAMESPACE/NAME"):
        pool_name(text)


def test_a_command_about_one_pool_takes_one() -> None:
    assert (only_pool(None), only_pool([]), only_pool(["llm/a:80", "llm/a"])) == (None, None, "llm/a")
    with pytest.raises(ConfigError, match="--pool: 2 pools are named"):
        only_pool(["llm/a", "llm/b"])
    with pytest.raises(ConfigError, match="--pool: 'a' is not NAMESPACE/NAME"):
        only_pool(["a"])

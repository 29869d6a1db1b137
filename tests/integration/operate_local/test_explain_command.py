"""`kvmesh explain` asks a running picker, and says what of the question cannot be meant."""

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from operate.cli import build
from operate.local.plan_commands import app as plan_app
from operate.local.top_commands import app as top_app
from tests.integration.kv_redis import RedisServer
from tests.integration.live_picker import PODS, live_picker


def explained(picker: str, body: Path, *options: str) -> Result:
    """Run the command as `kvmesh explain`."""
    from operate.local.commands import app

    return CliRunner().invoke(app, ["explain", str(body), "--picker", picker, *options])


@pytest.fixture
def body(tmp_path: Path) -> Path:
    """Return a file with a request."""
    (tmp_path / "body.json").write_text('{"model": "tiny", "prompt": "hello world"}', encoding="utf-8")
    return tmp_path / "body.json"


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        (("--objective", "gold"), "no class and no objective is called so; classes are critical", 2),
        (("--objective", "critical"), "the objective critical does not count, the request is standard (default)", 0),
        (("--objective", "sheddable"), "", 0),
        (("--path", "/v1/foo"), "bodies of this path are not read", 0),
        (("--for-host", "a.example"), "this picker has one pool", 0),
        ((), "", 0),
    ],
)
async def test_what_cannot_be_meant_is_said(
    redis_server: RedisServer, body: Path, options: tuple[str, ...], words: str, code: int
) -> None:
    async with live_picker(redis_server.url) as picker:
        asked = await asyncio.to_thread(explained, picker.admin, body, *options)
    assert asked.exit_code == code, asked.output
    assert "winner: 10.0.0." in asked.stdout
    assert words in asked.stderr
    assert bool(words) == bool(asked.stderr)


async def test_a_pool_that_is_not_there_is_wrong_usage_everywhere(redis_server: RedisServer, body: Path) -> None:
    async with live_picker(redis_server.url) as picker:
        asked = await asyncio.to_thread(explained, picker.admin, body, "--pool", "llm/a")
        pool = ("--picker", picker.admin, "--pool", "llm/a")
        planned = await asyncio.to_thread(CliRunner().invoke, plan_app, [*pool])
        seen = await asyncio.to_thread(CliRunner().invoke, top_app, ["--once", *pool])
    for ended in (asked, planned):  # `main` makes exit code 2 of it
        assert "--pool: the pool 'llm/a' is not known here; this picker has one pool" in str(ended.exception)
    assert seen.exit_code == 2
    assert "the pool 'llm/a' is not known here" in seen.stdout


async def test_all_forms_say_the_same(redis_server: RedisServer, body: Path) -> None:
    async with live_picker(redis_server.url) as picker:
        as_json = await asyncio.to_thread(explained, picker.admin, body, "-o", "json")
        as_yaml = await asyncio.to_thread(explained, picker.admin, body, "-o", "yaml")
    assert {each["endpoint"] for each in json.loads(as_json.stdout)["candidates"]} == set(PODS)
    assert {each["endpoint"] for each in yaml.safe_load(as_yaml.stdout)["candidates"]} == set(PODS)


def test_a_path_that_is_none_is_refused_before_anybody_is_asked(body: Path) -> None:
    asked = explained("http://127.0.0.1:1", body, "--path", "v1/completions")
    assert "a path begins with /" in str(asked.exception)


def test_every_command_that_prints_data_has_the_three_forms() -> None:
    root = build()
    printing = (
        *("doctor", "explain", "plan", "top", "version", "index lookup", "index sources", "index verify"),
        *("index size", "index clear", "audit verify", "policy check", "policy explain"),
    )
    for words in printing:
        command = root
        for word in words.split():
            command = command.commands[word]
        names = {option.name for option in command.params}
        assert "output" in names, words

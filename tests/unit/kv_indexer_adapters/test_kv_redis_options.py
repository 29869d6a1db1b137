"""The options that lead to Redis are the same in every command."""

from typing import Any

import typer

from extproc import redis_options as of_the_picker
from extproc.cli import build
from kv_indexer import redis_options as of_the_indexer

NAMES = ("ca_file", "cert_file", "key_file", "password_file", "sentinel_password_file", "server_name", "username")


def described(module: Any) -> dict[str, tuple[Any, str | None]]:
    options = {name: value for name, value in vars(module).items() if name.startswith("Redis")}
    return {name: (value.__origin__, value.__metadata__[0].help) for name, value in options.items()}


def test_picker_and_indexer_describe_them_alike() -> None:
    assert described(of_the_picker) == described(of_the_indexer)
    assert len(described(of_the_indexer)) == len(NAMES) + 1


def test_every_command_that_takes_an_address_takes_what_belongs_to_it() -> None:
    root: Any = build()
    commands = {name: {option.name for option in command.params} for name, command in root.commands.items()}

    with_redis = {name for name, options in commands.items() if "redis" in options}
    assert {"extproc", "indexer", "up"} <= with_redis
    for name in with_redis:
        assert commands[name] >= {f"redis_{option}" for option in NAMES}, name
    assert isinstance(root, typer.core.TyperGroup)

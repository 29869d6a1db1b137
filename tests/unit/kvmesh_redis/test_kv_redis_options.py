"""The options that lead to Redis are the same in every command."""

from collections.abc import Iterator, Mapping
from typing import Any

from extproc.cli import build

NAMES = ("ca_file", "cert_file", "key_file", "password_file", "sentinel_password_file", "server_name", "username")


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every command of a group and of the groups in it, with its options by name."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name}{word} ")
        else:
            yield name + word, {option.name: option for option in command.params}


def test_every_command_that_takes_an_address_takes_what_belongs_to_it_and_says_the_same_of_it() -> None:
    connecting = [(name, options) for name, options in commands(build()) if name != "install"]  # which writes it down
    with_redis = {name: options for name, options in connecting if "redis" in options}

    looking = {f"index {word}" for word in ("sources", "lookup", "verify", "size", "clear")}
    assert set(with_redis) == {"audit read", "doctor", "extproc", "indexer", "up", *looking}
    for name, options in with_redis.items():
        for option in (f"redis_{each}" for each in NAMES):
            assert options[option].help == with_redis["indexer"][option].help, name

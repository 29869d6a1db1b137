"""Lets an option be given under the name that it once had: as a flag, in the environment, and in the settings file.

Nothing shows the old name. Where both are set in the environment, or both in the file, the old one counts, as it did
before there was the new one.
"""

import os
from collections.abc import Mapping
from typing import Any


class OldName:
    """The old name of one option of typer's. It takes a value: a flag without one cannot have an old name."""

    def __init__(self, option: Any, *, name: str, prefix: str) -> None:
        """`name` is that of the setting, with underscores; `prefix` begins the variables of settings."""
        self._option = option
        self._name = name
        self._variable = f"{prefix}{name.upper()}"
        self._add_shown = option.add_to_parser
        self._from_new_variable = option.resolve_envvar_value
        option.add_to_parser = self.add_to_parser
        option.resolve_envvar_value = self.resolve_envvar_value
        option.old_name = name

    def add_to_parser(self, parser: Any, ctx: Any) -> None:
        """Have both flags read."""
        self._add_shown(parser, ctx)
        option = self._option
        parser.add_option(
            obj=option,
            opts=[f"--{self._name.replace('_', '-')}"],
            dest=option.name,
            action="append" if option.multiple else "store",
            nargs=option.nargs,
        )

    def resolve_envvar_value(self, ctx: Any) -> Any:
        """Return the text of the old variable, or of the new one."""
        return os.environ.get(self._variable) or self._from_new_variable(ctx)


def under_new_names(settings: Mapping[str, Any], command: Any) -> dict[str, Any]:
    """Return a file's settings with those of a command's old names under the names that it has now."""
    renamed = {option.name: option.old_name for option in command.params if hasattr(option, "old_name")}
    return dict(settings) | {new: settings[old] for new, old in renamed.items() if old in settings}

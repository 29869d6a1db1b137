"""Reads settings written in YAML. The parser is imported on first use: flags alone do not need it."""

import re
from typing import TYPE_CHECKING

from extproc.errors import ConfigError

if TYPE_CHECKING:
    from yaml import YAMLError

QUOTED = re.compile(r"'[^']{2,}'")  # a quote of the text in PyYAML's messages; a single character may stay


def read_yaml(text: str, *, where: str) -> object:
    """Parse the text. Raise ConfigError with its origin `where` and the position of the mistake."""
    import yaml  # noqa: PLC0415

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not readable as YAML: {_mistake(error)}") from None


def _mistake(error: "YAMLError") -> str:
    """Return the position and the kind of a mistake: `line 1, column 9: found character '@' that …`.

    The text is left out, as it may contain a password. PyYAML's own message shows the line, and takes a password with a
    leading * or ! for an alias or a tag, which it names.
    """
    mark = getattr(error, "problem_mark", None)
    problem = QUOTED.sub("'…'", getattr(error, "problem", None) or type(error).__name__)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else problem

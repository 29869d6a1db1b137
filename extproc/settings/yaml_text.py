"""YAML that settings are written in. The parser is loaded once there is a text: flags alone need none."""

import re
from typing import TYPE_CHECKING

from extproc.errors import ConfigError

if TYPE_CHECKING:
    from yaml import YAMLError

QUOTED = re.compile(r"'[^']{2,}'")  # of the text, in PyYAML's messages; a single character stays


def read_yaml(text: str, *, where: str) -> object:
    """Return what the text says. Raise ConfigError that names `where` it is from, and the place of the mistake."""
    import yaml  # noqa: PLC0415

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not readable as YAML: {_mistake(error)}") from None


def _mistake(error: "YAMLError") -> str:
    """Return the place and the kind of a mistake: `line 1, column 9: found character '@' that …`.

    Without the text, which may hold a password: PyYAML's own message shows the line, and names the alias or tag that a
    password with * or ! in front is to it.
    """
    mark = getattr(error, "problem_mark", None)
    problem = QUOTED.sub("'…'", getattr(error, "problem", None) or type(error).__name__)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else problem

"""What is wrong with a YAML text, without the text itself. Pure; for settings, which may hold a password.

PyYAML's own message shows the line, and names the alias or tag that a password with * or ! in front is to it.
"""

import re

import yaml

NAMED = re.compile(r"'[^']{2,}'")  # what is quoted of the text; a single character stays


def yaml_mistake(error: yaml.YAMLError) -> str:
    """Return the place and the kind of the mistake: `line 1, column 9: found character '@' that …`."""
    mark = getattr(error, "problem_mark", None)
    problem = NAMED.sub("'…'", getattr(error, "problem", None) or type(error).__name__)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else problem

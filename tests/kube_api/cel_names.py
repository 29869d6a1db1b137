"""Field names as CEL rules must write them. Pure."""

import re

_RESERVED = frozenset(
    {
        *("as", "break", "const", "continue", "else", "false", "for", "function", "if", "import", "in", "let", "loop"),
        *("namespace", "null", "package", "return", "true", "var", "void", "while"),
    }
)
_IDENTIFIER = re.compile(r"^[A-Za-z_][A-Za-z0-9_.\-/]*$")


def escaped(name: str) -> str:
    """A field's name as rules must write it."""
    if name in _RESERVED:
        return f"__{name}__"
    if not _IDENTIFIER.match(name):
        return name  # not to be reached from CEL
    for given, word in (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__")):
        name = name.replace(given, word)
    return name

"""Says what is wrong with a command of a page, as far as that can be told without running it.

`kvmesh …` is read by the command line itself, with the types of the values, except that files need not be there. Of
`make` the targets must exist, of `python -m` the module; a flag must be written in the module or those beside it.
"""

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import typer

from operate.cli import build
from tools.docs_site import REPOSITORY
from tools.reference import commands

COMMANDS = dict(commands(build()))
PLACEHOLDER = re.compile(r"…|\.\.\.$|^[A-Z_]+$")  # what the reader puts something in for
ENDS = {"|", "||", "&", "&&", ";", "(", ")"}
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
TARGETS = {match[1]: match[0] for match in re.finditer(r"^([a-z-]+):.*\n(?:\t.*\n|\n(?=\t))*", MAKEFILE, re.MULTILINE)}


def programs(line: str) -> list[list[str]]:
    """Return the programs that a line starts, each with its words."""
    line = re.sub(r" [<>]+ \S+", "", line)  # where it reads from and writes to
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in ENDS:
            found.append([])
        elif found[-1] or not re.match(r"\w+=", word):
            found[-1].append(word)
    return [words for words in found if words]


def wrong(line: str, *, whole: bool) -> list[str]:
    """Return what is wrong with a line; in a sentence, not `whole`, what is required may be left out."""
    found = []
    for program, *words in programs(line):
        if program.rpartition("/")[2] == "kvmesh":
            found += wrong_kvmesh(words, whole=whole)
        elif program == "make":
            found += wrong_make(words)
        elif program == "python":
            found += wrong_python(words)
        elif program == "kubectl" and "--" in words:
            found += wrong(shlex.join(words[words.index("--") + 1 :]), whole=whole)
    return found


def wrong_kvmesh(words: list[str], *, whole: bool) -> list[str]:
    """Return what the command line would say of these words."""
    called = [path for path in COMMANDS if words[: path.count(" ")] == path.split()[1:]]
    if not called:
        group = " ".join(["kvmesh", *words])
        is_group = not whole and any(path.startswith(f"{group} ") for path in COMMANDS)
        return [] if is_group or words == ["--version"] else [f"there is no command `{group}`"]
    path = max(called, key=len)
    command = COMMANDS[path]
    context = typer.Context(command, info_name=path)
    given = [word for word in words[path.count(" ") :] if word not in {"…", "..."}]
    try:
        values, more, _ = command.make_parser(context).parse_args(given)
    except Exception as error:
        if not whole and "requires an argument" in str(error):
            return []
        return [f"{path}: {getattr(error, 'message', error)}"]
    found = [f"{path} takes no {word!r}" for word in more]
    for option in command.params:
        if option.name in values and values[option.name] is not None:
            found += wrong_value(option, values[option.name], context)
        elif whole and option.required:
            found.append(f"{path} needs {option.name}")
    return found


def wrong_value(option: Any, value: Any, context: typer.Context) -> list[str]:
    """Return what is wrong with an option's value; a placeholder may stand for any, and a file need not be there."""
    described = option.type_descriptor
    if "Path" in str(described.annotation) or described.parameter_info.parser is not None:
        return []
    texts = [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
    if any(PLACEHOLDER.search(text) for text in texts):
        return []
    try:
        option.get_runtime_param().coerce(value, param=option, ctx=context)
    except typer.BadParameter as error:
        return [f"{option.opts[0]}: {error}"]
    return []


def wrong_make(words: list[str]) -> list[str]:
    """Return what is wrong with a target, and with the arguments that it hands on."""
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    targets = [word for word in words if "=" not in word]
    found = [f"make has no target {target}" for target in targets if target not in TARGETS]
    unread = [name for name in settings if not re.search(rf"\$\(.*\b{name}\b.*\)", MAKEFILE)]
    found += [f"the Makefile does not read {name}" for name in unread]
    if "ARGS" in settings and not found:
        (recipe,) = (TARGETS[target] for target in targets)
        modules = re.findall(r"-m (\S+) \$\(ARGS\)", recipe)
        arguments = shlex.split(settings["ARGS"])
        found += [each for module in modules for each in wrong_flags(module, arguments)]
        if not modules and "kvmesh up $(ARGS)" in recipe:
            found += wrong_kvmesh(["up", *arguments], whole=True)
    return found


def wrong_python(words: list[str]) -> list[str]:
    """Return what is wrong with `python -m MODULE …` or `python FILE …`."""
    if words[0] != "-m":
        return [] if (REPOSITORY / words[0]).is_file() else [f"there is no {words[0]}"]
    return wrong_tests(words[2:]) if words[1] == "pytest" else wrong_flags(words[1], words[2:])


def wrong_tests(words: list[str]) -> list[str]:
    """Return the tests that are not there."""
    return [f"there is no {word}" for word in words if word.startswith("tests/") and not (REPOSITORY / word).exists()]


def wrong_flags(module: str, words: list[str]) -> list[str]:
    """Return the flags that neither a module nor those beside it have, or that there is no such module."""
    path = REPOSITORY / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        return [f"there is no module {module}"]
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    known = texts(path) if path.parent.parent == REPOSITORY else texts(*sorted(path.parent.glob("*.py")))
    return [f"{module} has no {flag}" for flag in sorted(flags - known)]


@cache
def texts(*paths: Path) -> frozenset[str]:
    """Return every text that is written out in modules."""
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))

"""Every command that a page shows or names is one that we have, and each that is shown is in a list of what is tried.

tests/docs_commands/listed.yaml is that list; tests/e2e/test_docs_commands.py runs what is to be run.
"""

from pathlib import Path

import pytest

from tests.docs_commands.listed import TREATMENTS, Listed, entry_of, read_list, to_list
from tests.docs_commands.pages import (
    OTHER,
    PAGES,
    SHELL,
    Command,
    commands,
    flags_alone,
    is_shell,
    languages,
    mentioned,
    name,
    shown,
)
from tests.docs_commands.parsing import COMMANDS, texts, wrong
from tests.docs_commands.references import is_rendered, rendered_names
from tools.docs_site import REPOSITORY

ENTRIES = read_list()
# of vLLM, SGLang, kubectl, helm and docker; the page for those who come from another router has a test of its own
OF_OTHERS = set((REPOSITORY / "tests" / "docs_commands" / "flags_of_others.txt").read_text(encoding="utf-8").split())
BENCHES = texts(*sorted((REPOSITORY / "bench").rglob("*.py")))
OURS = {
    flag
    for command in COMMANDS.values()
    for option in command.params
    for flag in (*option.opts, *option.secondary_opts)
} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page: Path) -> None:
    """One without a language is a shell block; what is neither shell nor a format is `text`."""
    assert [language for language in languages(page) if language not in (*SHELL, *OTHER)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_of_a_page_are_ours_with_their_flags(page: Path) -> None:
    found = [(each.line, reason) for each in shown(page) for reason in wrong(each.line, whole=True)]
    found += [(each.line, reason) for each in mentioned(page) for reason in wrong(each.line, whole=False)]
    assert found == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "coming-from.md"], ids=name)
def test_the_flags_that_a_sentence_names_are_known(page: Path) -> None:
    assert flags_alone(page) - OURS - BENCHES - OF_OTHERS == set()


@pytest.mark.parametrize("command", to_list(), ids=lambda command: f"{command.page}: {command.line[:60]}")
def test_every_command_of_a_block_is_in_the_list(command: Command) -> None:
    assert entry_of(command, ENTRIES), (
        f"{command.page} shows `{command.line}`: put it into tests/docs_commands/listed.yaml, "
        "to be run, to be parsed, or with the reason why neither is possible; if it is no command, "
        "begin its block with ```text"
    )


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.page}: {entry.beginning[:60]}")
def test_every_entry_of_the_list_is_on_its_page(entry: Listed) -> None:
    assert entry in [entry_of(command, ENTRIES) for command in to_list()]
    assert entry.treatment in TREATMENTS
    assert entry.treatment != "not" or entry.text


def test_what_kubectl_is_asked_for_is_what_an_installation_renders() -> None:
    asked = {
        each for page in PAGES for command in (*shown(page), *mentioned(page)) for each in rendered_names(command.line)
    }
    assert {"deployment/kvmesh-picker", "secret/kvmesh-admin-token"} <= asked
    assert [each for each in sorted(asked) if not is_rendered(each)] == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("kvmesh extproc --no-such-flag", "No such option: --no-such-flag"),
        ("kvmesh no-such-command", "no command"),
        ("kvmesh explain", "needs body"),
        ("kvmesh up --pods 1000", "less than or equal to 64"),
        ("kvmesh install --mode sideways", "'sideways' is not one of"),
        ("kvmesh plan now", "takes no 'now'"),
        ("cat file | kvmesh explain - --such", "No such option: --such"),
        ("kubectl exec pod -- kvmesh doctor --such", "No such option: --such"),
        ("make no-such-target", "no target no-such-target"),
        ('make bench-routing ARGS="--such"', "has no --such"),
        ('make demo ARGS="--such"', "No such option: --such"),
        ("make test NOTHING=1", "does not read NOTHING"),
        ("python -m bench.no_such", "no module bench.no_such"),
        ("python -m bench.routing.run --such", "has no --such"),
        ("A=b python -m pytest tests/no_such", "there is no tests/no_such"),
        ("python bench/no_such.py", "there is no bench/no_such.py"),
    ],
)
def test_what_is_wrong_is_said(line: str, reason: str) -> None:
    assert any(reason in each for each in wrong(line, whole=True)), wrong(line, whole=True)


def test_a_command_goes_on_where_a_shell_would_wait() -> None:
    block = "a \\\n  b  # why\nc '{\n d}'\ne |\n  f\n"
    assert commands(block) == ["a b", "c '{ d}'", "e | f"]
    assert commands("$ a \\\n  b\nprinted\n$ c\n") == ["a b", "c"]


def test_what_was_printed_is_no_command() -> None:
    assert is_shell("kvmesh plan                # now\nkvmesh plan --in 1h\n")
    assert is_shell("    vllm serve MODEL --flag \\\n      --other\n")
    assert is_shell("$ kvmesh plan\npod   state\n0     ready\n")
    assert not is_shell("kvmesh top    1 of 1 replicas connected\n")
    assert not is_shell("questions: 24 users\n")

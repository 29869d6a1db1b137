"""One thing has one name over all commands: an address, a folder, a file, a pool."""

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest

from operate.cli import build

# what the help says of an option -> the one name that such an option has
THINGS = {
    r"^(The picker's admin address|Admin address of (a|the)( running)? picker)": "picker",
    r"^Admin address of (a|the)( running)? indexer": "indexer",
    r"^Admin address of an Envoy": "envoy-admin",
    r"^.*\bfolder (of|in|with)\b.*\b(YAML|documents)\b": "policies",
    r"^(Redis:|Redis or Valkey of)": "redis",
    r"^Seed of the block keys": "hash-seed",
    r"^Pool (to|of the request)\b": "pool",
    r"^Output format": "output",
    r"^Keys of the chain\b|^File with keys for the hashes": "audit-key-file",
    r"^Folder of tokenizer folders|^Tokenizer folders": "tokenizers",
    r"^Folder with .*tokenizer\.json": "tokenizer",
    r"^File with the admin token\b": "token-file",
    r"^File with admin tokens": "admin-token-file",
    r"^Do not ask": "yes",
    r"^Timeout of (the|each) (picker|index|call|Redis call)\b.*milliseconds.$": "timeout-ms",
}
# names whose help sounds alike and that are two things all the same, with what tells them apart
TWO_THINGS = {
    ("admin-port", "indexer-admin-port"): "of the picker, and of the indexer: one machine may have both",
    ("admin-tls", "ca"): "what the admin pages show, and who may have signed it",
    ("admin-tls", "cert"): "what the admin pages show, and what they are shown",
    ("admin-tls", "grpc-tls"): "two ports",
    ("ca", "cert"): "who may have signed what the admin pages show, and what they are shown",
    ("indexer", "picker"): "two processes",
}
STOP = frozenset(
    {
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "by",
        "default",
        "for",
        "from",
        "in",
        "is",
        "it",
        "its",
        "no",
        "none",
        "of",
        "on",
        "or",
        "that",
        "the",
        "them",
        "this",
        "to",
    }
)


def options() -> Mapping[str, set[str]]:
    """Return the help texts of each name that the commands show."""
    found: dict[str, set[str]] = defaultdict(set)

    def walk(command: Any) -> None:
        for inner in getattr(command, "commands", {}).values():
            walk(inner)
        for option in () if hasattr(command, "commands") else command.params:
            if option.param_type_name == "option" and not option.hidden:
                found[max(option.opts, key=len).lstrip("-")].add(" ".join((option.help or "").split()))

    walk(build())
    return found


def content(help_text: str) -> frozenset[str]:
    """Return the words that say what an option is about, of its first sentence."""
    first = re.split(r"[.;] ", help_text)[0]
    return frozenset(re.findall(r"[a-z]+", first.lower())) - STOP


def sound_alike(one: set[str], other: set[str]) -> bool:
    """Tell whether some help of one option says nearly the same as some help of another."""
    pairs = ((content(a), content(b)) for a in one for b in other)
    return any(min(len(a), len(b)) >= 3 and len(a & b) >= 0.8 * max(len(a), len(b)) for a, b in pairs)


@pytest.mark.parametrize("name", sorted(options()))
def test_an_option_is_called_what_its_help_says(name: str) -> None:
    for help_text in options()[name]:
        due = {called for words, called in THINGS.items() if re.search(words, help_text)}
        assert due <= {name}, f"--{name} ({help_text!r}) is what other commands call {due - {name}}"


def test_each_thing_is_some_option() -> None:
    """A table whose words match nothing would find nothing."""
    every = options()
    for words, called in THINGS.items():
        hidden = called not in every
        assert hidden or any(re.search(words, text) for text in every[called]), words


def test_no_two_names_have_one_help() -> None:
    every = options()
    alike = {pair for pair in combinations(sorted(every), 2) if sound_alike(every[pair[0]], every[pair[1]])}
    assert alike - TWO_THINGS.keys() == set(), "give them one name, or say in TWO_THINGS what tells them apart"

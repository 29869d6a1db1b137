"""The architecture page lists every room with the sentence that the room opens with, and it is short."""

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "architecture.md"
PACKAGES = ("operate", "extproc", "kv_indexer", "kvmesh")
TWO_PAGES = 120  # lines
MOST_AT_THE_TOP = 4  # modules of extproc that stand in no room


def rooms() -> dict[str, str]:
    """Return each room with the sentence that opens it."""
    found = {}
    for package in PACKAGES:
        for init in sorted((REPOSITORY / package).glob("*/__init__.py")):
            sentence = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
            assert sentence, f"{init} does not say what the room is for"
            found[init.parent.relative_to(REPOSITORY).as_posix()] = " ".join(sentence.split())
    return found


def test_the_page_lists_every_room_with_its_sentence() -> None:
    lines = PAGE.read_text(encoding="utf-8").partition("## Rooms")[2].splitlines()
    listed = dict(line.removeprefix("* `").split("`: ", 1) for line in lines if line.startswith("* `"))
    assert listed == rooms()


def test_the_page_is_two_pages_at_most() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= TWO_PAGES


def test_every_module_says_what_it_is_for() -> None:
    for package in (*PACKAGES, "podsim"):
        for path in (REPOSITORY / package).rglob("*.py"):
            if path.stat().st_size:
                assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_few_modules_of_the_picker_stand_in_no_room() -> None:
    top = {path.name for path in (REPOSITORY / "extproc").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert len(top) <= MOST_AT_THE_TOP, top


def test_every_module_that_the_page_names_exists() -> None:
    for name in re.findall(r"`((?:[a-z_0-9]+\.)+[A-Za-z_0-9]+)`", PAGE.read_text(encoding="utf-8")):
        room, module = re.sub(r"^(kvmesh|kv_indexer|extproc|operate)\.", "", name).split(".")[:2]
        folders = [REPOSITORY / package / room for package in PACKAGES if (REPOSITORY / package / room).is_dir()]
        assert not folders or any((folder / f"{module}.py").exists() for folder in folders), name

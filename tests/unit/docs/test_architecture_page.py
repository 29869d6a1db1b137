"""The architecture page lists every module with the sentence that the module opens with."""

import ast
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
PACKAGES = ("extproc", "kv_indexer", "podsim")


def expected_lines() -> set[str]:
    modules = [(package, path) for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]
    return {
        f"* `{path.relative_to(REPOSITORY / package)}`: {opening(path)}"
        for package, path in modules
        if path.name not in ("__init__.py", "__main__.py")
    }


def opening(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path} does not say what it is for"
    return " ".join(docstring.split("\n\n")[0].split())


def test_the_list_of_modules_is_the_code() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = {line for line in page.partition("## Modules")[2].splitlines() if line.startswith("* ")}
    assert listed == expected_lines()

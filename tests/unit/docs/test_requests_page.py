"""docs/reference/requests.md names every API and every path that is read."""

from pathlib import Path

import pytest

from extproc.requests.openai import parse_request
from extproc.requests.request import ApiKind

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "requests.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:5] for line in PAGE.splitlines() if line.startswith("| `/")]
PATHS = [
    (path.strip().strip("`").replace("…", "/v1/messages"), api.strip().strip("`"), refused.strip())
    for paths, api, _, refused in ROWS
    for path in paths.split(",")
]


@pytest.mark.parametrize(("path", "api", "refused"), PATHS, ids=lambda value: value)
def test_the_table_says_which_api_a_path_is_and_who_answers_for_it(path: str, api: str, refused: str) -> None:
    assert parse_request(path=path, body=None).api.value == api
    try:
        parse_request(path=path, body=b"{")
        answers = "no"
    except Exception:
        answers = "yes"
    assert answers == refused


def test_every_api_is_in_the_table() -> None:
    assert {api for _, api, _ in PATHS} | {"other"} == {kind.value for kind in ApiKind}
    assert len(PATHS) >= 20

"""The dashboards drawn without Grafana: every panel is in the picture with its data, or says that it has none."""

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.prometheus.monitoring import BOARDS, Json, panels_of
from tools.dashboard_drawing import COLUMN_INCHES, COLUMNS, DOTS_AN_INCH, Line, draw, figure_of, written
from tools.dashboard_pictures import as_grafana_asks, legend_of, redis_lines, usual_values

BOARD = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
VALUES = usual_values(scrape_seconds=15.0, shown_seconds=900.0, endpoint="10.0.0.1:8000")
RISING = tuple((1_700_000_000.0 + at, float(at)) for at in range(10))


def words_of(figure: Figure) -> list[str]:
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    return [text.get_text() for text in texts]


@BOARD
def test_what_has_no_data_says_so_in_its_own_words_where_that_is_well(board: Json) -> None:
    words = words_of(figure_of(board, {}))
    assert {panel["title"] for panel in board["panels"]} <= set(words)
    for panel in panels_of(board):
        own = panel["fieldConfig"]["defaults"].get("noValue")
        assert (own or ("No rows" if panel["type"] == "table" else "No data")) in words


@BOARD
def test_every_panel_is_drawn_inside_its_frame(board: Json, tmp_path: Path) -> None:
    data = {
        panel["title"]: [
            Line(legend=f"{target['refId']}{number}", labels={"a": "b"}, points=RISING)
            for target in panel["targets"]
            for number in range(5)
        ]
        for panel in panels_of(board)
    }
    figure = figure_of(board, data)
    assert "No data" not in words_of(figure)
    curves = [axes for axes in figure.axes if axes.lines]
    assert len(curves) == sum(panel["type"] == "timeseries" for panel in panels_of(board))
    for axes in curves:
        box = axes.get_position()
        assert (0 <= box.x0 < box.x1 <= 1, 0 <= box.y0 < box.y1 <= 1) == (True, True)
    path = tmp_path / "board.png"
    draw(board, data, path, rows=9)
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(header[16:20], "big") == round(COLUMNS * COLUMN_INCHES * DOTS_AN_INCH)


def test_what_cannot_be_drawn_is_no_data() -> None:
    board = BOARDS["kvmesh-overview"]
    panel = next(each for each in panels_of(board) if each["type"] == "timeseries")
    line = Line(legend="a", labels={}, points=((1.0, math.nan), (2.0, math.inf)))
    assert words_of(figure_of(board, {panel["title"]: [line]})) == words_of(figure_of(board, {}))


def test_an_axis_of_nothing_but_zeros_begins_at_zero() -> None:
    board = BOARDS["kvmesh-overview"]
    panel = next(each for each in panels_of(board) if each["title"] == "Outcomes")
    flat = Line(legend="a", labels={}, points=((1.0, 0.0), (2.0, 0.0)))
    (axes,) = [each for each in figure_of(board, {panel["title"]: [flat]}).axes if each.lines]
    assert axes.get_ylim() == (0.0, 1.0)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.953, "percentunit", "95.3 %"),
        (0.0123, "s", "12.3 ms"),
        (4e-5, "s", "40 µs"),
        (0.0, "s", "0 s"),
        (2.5, "s", "2.5 s"),
        (3 * 2.0**20, "bytes", "3 MiB"),
        (0.0, "bytes", "0 B"),
        (120.0, "reqps", "120 req/s"),
        (30_000.0, "cps", "30 k /s"),
        (1_795_704_801.0, "none", "1795704801"),
        (2_500_000.0, "short", "2.5 M"),
    ],
)
def test_numbers_are_written_for_people(value: float, unit: str, text: str) -> None:
    assert written(value, unit) == text


@BOARD
def test_every_query_can_be_asked(board: Json) -> None:
    for panel in panels_of(board):
        for target in panel["targets"]:
            if "expr" in target:
                assert "$" not in as_grafana_asks(target["expr"], VALUES)
    with pytest.raises(ValueError, match="unknown"):
        as_grafana_asks('up{a="$unknown"}', VALUES)


def test_legends_and_fields_of_redis() -> None:
    class Server:
        def execute_command(self, *words: str) -> object:
            return {"info": {"used_memory": 5, "maxmemory": "much"}, "dbsize": 3}[words[0]]

    assert legend_of({"legendFormat": "{{role}} of {{x}}"}, {"role": "both"}) == "both of "
    assert legend_of({"legendFormat": "__auto"}, {"role": "both"}) == ""
    wanted = {"id": "filterFieldsByName", "options": {"include": {"names": ["used_memory", "maxmemory"]}}}
    memory, limit = redis_lines(
        Server(), {"transformations": [wanted]}, {"type": "command", "command": "info", "section": "memory"}
    )
    assert (memory.legend, memory.known[0][1], limit.labels["text"]) == ("used_memory", 5.0, "much")
    [keys] = redis_lines(Server(), {}, {"type": "cli", "query": "dbsize"})
    assert keys.known[0][1] == 3.0

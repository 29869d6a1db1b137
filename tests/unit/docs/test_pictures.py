"""The pictures in docs/images are what tools.pictures draws; all their text is inside, and a page shows each."""

from xml.etree import ElementTree

import pytest

from tools.docs_site import DOCS
from tools.drawing import Arrow, Box, Words, drawing
from tools.pictures import FOLDER, PICTURES

SVG = "{http://www.w3.org/2000/svg}"
PLAIN, BOLD = 0.53, 0.6  # of the size of a font: how wide a letter is on average, where the widest fallback is used


def extents(name: str) -> list[tuple[float, float, float, str]]:
    """Return left, right, base line and words of each text."""
    found: list[tuple[float, float, float, str]] = []
    for text in ElementTree.fromstring(PICTURES[name]()).iter(f"{SVG}text"):
        words, x = text.text or "", float(text.attrib["x"])
        wide = (BOLD if "font-weight" in text.attrib else PLAIN) * float(text.attrib["font-size"]) * len(words)
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[text.attrib["text-anchor"]]
        found.append((left, left + wide, float(text.attrib["y"]), words))
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_the_file_is_what_is_drawn(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PICTURES[name](), "run: make reference"


def test_every_drawing_among_the_images_is_drawn_by_the_script() -> None:
    assert {path.name for path in FOLDER.glob("*.svg")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_leaves_the_picture(name: str) -> None:
    root = ElementTree.fromstring(PICTURES[name]())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert [words for left, right, y, words in extents(name) if left < 4 or right > width - 4] == []
    assert [words for left, right, y, words in extents(name) if not 12 < y < height - 4] == []


@pytest.mark.parametrize("name", PICTURES)
def test_no_two_lines_of_text_cover_each_other(name: str) -> None:
    found = extents(name)
    for place, (left, right, y, words) in enumerate(found):
        for other_left, other_right, other_y, other in found[:place]:
            assert abs(y - other_y) >= 14 or right <= other_left or other_right <= left, (words, other)


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_shows_it_with_words_for_who_does_not_see_it(name: str) -> None:
    shown = [
        line for page in DOCS.rglob("*.md") for line in page.read_text(encoding="utf-8").splitlines() if name in line
    ]
    assert shown
    assert all(line.startswith("![") and len(line.partition("]")[0]) > 30 for line in shown)
    root = ElementTree.fromstring(PICTURES[name]())
    assert root.findtext(f"{SVG}title")
    assert len(root.findtext(f"{SVG}desc") or "") > 100


def test_a_drawing_escapes_what_it_says() -> None:
    parts: list[Box | Words | Arrow] = [
        Box(at=(1, 1), size=(90, 30), title="a < b & c"),
        Words(at=(1, 60), text="<b>"),
        Arrow(points=((1, 1), (9, 9))),
    ]
    root = ElementTree.fromstring(drawing(size=(100, 80), title='"<&', about="nothing", parts=parts))
    assert [text.text for text in root.iter(f"{SVG}text")] == ["a < b & c", "<b>"]


def test_the_head_of_an_arrow_points_where_the_line_goes() -> None:
    root = ElementTree.fromstring(
        drawing(size=(100, 80), title="t", about="a", parts=[Arrow(points=((10, 10), (50, 10)), both=True)])
    )
    tips = [polygon.attrib["points"].split()[0] for polygon in root.iter(f"{SVG}polygon")]
    assert tips == ["52.0,10.0", "8.0,10.0"]

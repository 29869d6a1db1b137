"""Every policy that a page shows is one that `kvmesh policy check` takes without an error or a warning."""

import re
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent

import pytest

from operate.policy.check import ERROR, WARNING, Checked, Remark, Source, check_sources

DOCS = Path(__file__).parents[3] / "docs"
BLOCK = re.compile(r"^(?P<indent> *)```ya?ml\n(?P<text>.*?)^ *```", re.MULTILINE | re.DOTALL)
# settings, values of the chart and the like: how a block begins that is no policy and no document
OTHERS = (
    "# kvmesh.yaml",
    "# values.yaml",
    "externalRules:",
    "event_sources:",
    "http_filters:",
)
# page -> what the command warns of there, and the page says itself
WARNED = {
    "reference/policy-precedence.md": ["spec.failureMode"],
    "reference/policy.md": ["spec.disaggregation.enabled"],
}


def blocks() -> list[tuple[str, str]]:
    """Return the place and the text of every YAML block of the pages."""
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            found.append((f"{page.relative_to(DOCS)}:{line}", dedent(match["text"])))
    return found


BLOCKS = [(place, text) for place, text in blocks() if not text.startswith(OTHERS)]


def checked_in(text: str) -> list[Checked]:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return check_sources([Source("page.yaml", text.encode())], root_namespace="istio-system", now=now)


def remarks(text: str) -> list[Remark]:
    return [remark for checked in checked_in(text) for remark in checked.remarks]


@pytest.mark.parametrize(("place", "text"), BLOCKS, ids=[place for place, _ in BLOCKS])
def test_the_policy_is_valid_and_not_doubtful(place: str, text: str) -> None:
    found = remarks(text)
    assert [remark.message for remark in found if remark.level == ERROR] == [], place
    doubtful = [remark.path for remark in found if remark.level == WARNING]
    assert doubtful == WARNED.get(place.partition(":")[0], []), place


def test_the_pages_that_are_about_policies_are_among_them() -> None:
    pages = {place.partition(":")[0] for place, text in BLOCKS if checked_in(text)}
    assert pages >= {
        *("reference/policy.md", "reference/inference-policy.md", "reference/policy-precedence.md"),
        *(f"guides/{name}.md" for name in ("autoscaling", "degradation", "disaggregation", "models", "planning")),
        *(f"guides/{name}.md" for name in ("priorities", "promises", "quotas", "shadow")),
    }


def test_a_mistake_in_a_page_would_be_found() -> None:
    text = next(text for place, text in BLOCKS if place.startswith("reference/policy.md:"))
    assert any(remark.level == ERROR for remark in remarks(text.replace("sessionSeconds", "sessionSecond", 1)))

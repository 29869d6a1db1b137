"""docs/guides/priorities.md has the targets of each tolerance and each name."""

import re

from extproc.policy.targets import MLPERF_TARGETS, TARGETS
from tools.docs_site import DOCS

PAGE = (DOCS / "guides" / "priorities.md").read_text(encoding="utf-8")
SECONDS = r"([\d.,]+) s"


def seconds(*texts: str) -> tuple[float, ...]:
    return tuple(float(text.replace(",", "")) for text in texts)


def test_the_table_of_tolerances_has_their_targets() -> None:
    rows = re.findall(rf"^\| `([a-z]+)` \|[^|]*\| {SECONDS} \| {SECONDS} \| {SECONDS} \|$", PAGE, re.MULTILINE)
    assert {name: seconds(*times) for name, *times in rows} == {
        name: (each.ttft_seconds, each.inter_token_seconds, each.queue_seconds) for name, each in TARGETS.items()
    }


def test_the_table_of_named_targets_has_their_seconds() -> None:
    pair = f"{SECONDS}, {SECONDS}"
    rows = re.findall(rf"^\| `(mlperf-[^`]+)` \| {pair} \| {pair} \|$", PAGE, re.MULTILINE)
    plain = {name: seconds(ttft, inter_token) for name, ttft, inter_token, _, _ in rows}
    interactive = {f"{name}-interactive": seconds(ttft, inter_token) for name, _, _, ttft, inter_token in rows}
    assert plain | interactive == MLPERF_TARGETS

"""Measured figures that several pages quote are those of the recorded results, or stand alike on each page.

Tables come from the results by `make reference`. A sentence cannot: it is written here with the figures of the result.
"""

import re

import pytest

from tools.docs_site import DOCS, REPOSITORY
from tools.recorded import case, newest, short

PAGES = {path.stem: path for path in DOCS.rglob("*.md")} | {"README": REPOSITORY / "README.md"}


def cpu(tokens: int, concurrency: int) -> str:
    return short(case(tokens, concurrency)["picker_cpu_ms"]["median"])


def added(tokens: int) -> str:
    return short(case(tokens, 1)["added_by_picker"]["p50_ms"]["median"])


def microseconds(tokens: int, concurrency: int) -> str:
    return f"{10 * round(case(tokens, concurrency)['picker_cpu_ms']['median'] * 100):,}"


def a_core(tokens: int) -> str:
    return f"{case(tokens, 16)['requests_per_second_per_picker_core'] // 10 * 10:,.0f}"


def verdict(kind: str, target: str) -> str:
    found = next(each["measured"] for each in newest(kind)["verdicts"] if target in each["target"])
    return str(found)


def router_cpu(arm: str) -> str:
    used = [each["router_cpu_ms"] for each in newest("routing", arm="vllm-router")["runs"] if each["arm"] == arm]
    return f"{min(used):.0f} to {max(used):.0f}"


ALERTS = re.findall(r"^### Kvmesh", PAGES["operations"].read_text(encoding="utf-8"), re.MULTILINE)
CRITICAL = verdict("overload", "critical p99").partition(" ")[0]
STEADY = verdict("overload", "steady").partition("%")[0]
FASTER = verdict("routing", "mean TTFT at least 3").partition(" ")[0]

RECORDED = {
    f"{router_cpu('kvmesh')} ms": ["routing-benchmark", "beside-others"],
    f"{router_cpu('vllm-router')} ms": ["routing-benchmark", "beside-others"],
    f"{router_cpu('smg')} ms of smg": ["routing-benchmark"],
    f"costs {microseconds(200, 16)} to {microseconds(8000, 1)}": ["audit"],
    f"carries {a_core(8000)} requests/s of 8,000 tokens": ["benchmarks"],
    f"| {cpu(8000, 16)} | {cpu(8000, 1)} | {added(8000)} |": ["benchmarks"],
    f"calibration loop {newest('picker')['calibration']['loop_ns_per_iteration']['median']:.0f} ns": ["benchmarks"],
    f"{CRITICAL} times": ["overload-benchmark"],
    f"{STEADY} % of what half of": ["overload-benchmark"],
    f"a mean TTFT {FASTER} times lower": ["routing-benchmark"],
}
ALIKE = {
    "138 to 161 bytes": ["redis", "0003-redis-schema"],
    "76,000": ["index-speed", "0003-redis-schema"],
    "0.5 to 1 s": ["policy-precedence", "limits"],
    "15 to 65 s": ["sizing", "limits"],
    "2,048 blocks": ["live-feed", "limits"],
    "within 1 s": ["README", "own-pods", "limits"],
    "0.6 to 1.7 s": ["redis"],
    f"{len(ALERTS)} alerts": ["README"],
}


@pytest.mark.parametrize(("words", "pages"), [*RECORDED.items(), *ALIKE.items()], ids=[*RECORDED, *ALIKE])
def test_the_pages_quote_the_figure(words: str, pages: list[str]) -> None:
    for page in pages:
        assert words in " ".join(PAGES[page].read_text(encoding="utf-8").split()), page


@pytest.mark.parametrize("kind", ["picker", "watched", "routing", "overload"])
def test_the_pages_link_to_the_newest_result(kind: str) -> None:
    name = max(REPOSITORY.glob(f"bench/results/*-{kind}.json")).name
    assert any(name in path.read_text(encoding="utf-8") for path in (DOCS / "evidence").glob("*.md"))


def test_watching_costs_what_the_page_says() -> None:
    text = PAGES["benchmarks"].read_text(encoding="utf-8")
    for each in newest("watched")["cases"]:
        assert f"{short(each['off_cpu_ms']['median'])}" in text
        assert f"{100 * each['above']['median']:+.1f} %" in text

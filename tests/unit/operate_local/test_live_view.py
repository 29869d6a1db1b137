"""The page of `kvmesh up` and `kvmesh top` in a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from extproc.pages.picker_state import ClassState, DecisionState, EndpointState, IndexState, PickerState, PrefillState
from operate.local.live_view import decision_line, page

PICKED = DecisionState(
    at=1_700_000_000.0,
    path="/v1/chat/completions",
    endpoint="127.0.0.1:8101",
    matched_tokens=96,
    prompt_tokens=120,
    reasons=("prefix 0.80 × 3", "queue-depth 1.00 × 2", "kv-usage 0.97 × 1"),
)
SHED = DecisionState(
    at=1_700_000_001.0,
    path="/v1/completions",
    endpoint=None,
    status=503,
    reasons=("shed: every endpoint is saturated",),
    degraded=("prefix-index-timeout",),
)
READY = EndpointState(
    address="127.0.0.1:8101", state="ready", cached_blocks=1234, running=2, waiting=1,
    kv_usage=0.5, hit_rate=0.75, picks=9, share=0.9,
)  # fmt: skip
GONE = EndpointState(address="127.0.0.1:8102", state="unreachable", picks=1, share=0.1)


def state(
    *, endpoints: Sequence[EndpointState] = (READY, GONE), decisions: Sequence[DecisionState] = (SHED, PICKED)
) -> PickerState:
    return PickerState(
        now=1_700_000_002.0,
        endpoints=tuple(endpoints),
        index=IndexState(state="ok", sources=2),
        decisions=tuple(decisions),
    )


def decided(number: int) -> DecisionState:
    return msgspec.structs.replace(PICKED, at=PICKED.at - number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terminal:
    """What a terminal of that size shows."""

    width: int = 80
    height: int = 24
    lines_above: int = 0

    def lines(self, shown: PickerState) -> list[str]:
        console = Console(file=StringIO(), width=self.width, height=self.height)
        drawn = page(
            shown,
            zone=UTC,
            width=self.width,
            height=self.height,
            lines_above=self.lines_above,
            closing="Ctrl-C ends everything",
        )
        with console.capture() as capture:
            console.print(drawn)
        lines = capture.get().splitlines()
        assert len(lines) <= self.height
        assert max(map(len, lines)) <= self.width
        return [line.rstrip() for line in lines]


def test_the_page_names_each_pod_with_its_load_and_each_decision_with_its_reasons_at_80_columns() -> None:
    assert Terminal().lines(state()) == [
        "pod              state        blocks  run  wait   KV  hits    picks",
        "127.0.0.1:8101   ready         1,234    2     1  50%   75%   9  90%",
        "127.0.0.1:8102   unreachable       0    -     -    -     -   1  10%",
        "all 2            1 ready       1,234    2     1  50%     -  10 100%",
        "hit rate 80% of the last 1 prompts",
        "last decisions: tokens found in the cache, and why",
        "22:13:21       0/0  503  /v1/completions",
        "         shed: every endpoint is saturated",
        "         degraded: prefix-index-timeout",
        "22:13:20    96/120  127.0.0.1:8101  /v1/chat/completions",
        "         prefix 0.80 × 3, queue-depth 1.00 × 2, kv-usage 0.97 × 1",
        "prefix index: ok, 2 sources    Ctrl-C ends everything",
    ]


def test_roles_and_who_computed_a_prompt_are_shown_where_pods_have_roles() -> None:
    prefill = msgspec.structs.replace(READY, address="127.0.0.1:8103", role="prefill")
    plan = PrefillState(
        where="remote", why="", rule="always", endpoint=prefill.address, uncached_tokens=1, remote_uncached_tokens=1,
        prefill_queue=0, decode_requests=0, local_ms=2.0, remote_ms=1.0, transfer_ms=0.5,
    )  # fmt: skip
    split = msgspec.structs.replace(PICKED, prefill=plan)
    shown = Terminal(width=90).lines(state(endpoints=[READY, prefill], decisions=[split]))
    assert [line.split()[1] for line in shown[:3]] == ["role", "both", "prefill"]
    assert "127.0.0.1:8101, prompt by 127.0.0.1:8103  /v1/chat/completions" in "\n".join(shown)
    alone = msgspec.structs.replace(split, prefill=msgspec.structs.replace(plan, where="local"))
    assert not any("prompt by" in line for line in Terminal().lines(state(decisions=[alone])))


def test_a_policy_in_shadow_and_requests_that_wait_for_the_first_pod_are_named() -> None:
    waiting = ClassState(name="standard", waiting=3, waiting_for_pod=3)
    shown = Terminal().lines(msgspec.structs.replace(state(decisions=()), classes=[waiting], shadow=True))
    assert "under pressure: standard 3 waiting for the first pod" in shown
    assert shown[-1] == "prefix index: ok, 2 sources    in shadow: only counts    Ctrl-C ends everything"


def test_before_the_first_request_the_page_says_so() -> None:
    assert Terminal().lines(state(decisions=()))[-2] == "none yet"


@pytest.mark.parametrize("pods", [4, 12, 64])
def test_a_small_terminal_shows_four_decisions_whatever_the_number_of_pods(pods: int) -> None:
    shown = Terminal().lines(state(endpoints=[READY] * pods, decisions=[decided(i) for i in range(50)]))

    assert sum("/v1/chat/completions" in line for line in shown) >= 4
    assert sum("queue-depth 1.00" in line for line in shown) >= 4


def test_pods_that_do_not_fit_are_counted_with_those_that_are_not_ready() -> None:
    shown = Terminal().lines(state(endpoints=[READY] * 30 + [GONE] * 2, decisions=[decided(i) for i in range(50)]))

    assert "and 22 more, 2 of them not ready" in shown
    assert sum(line.startswith("127.0.0.1") for line in shown) == 10


def test_what_was_printed_above_stays_on_a_tall_terminal() -> None:
    shown = Terminal(height=45, lines_above=28).lines(
        state(endpoints=[READY] * 4, decisions=[decided(i) for i in range(50)])
    )

    assert len(shown) <= 45 - 28
    assert sum("/v1/chat/completions" in line for line in shown) == 4


def test_a_terminal_too_small_for_both_is_used_whole() -> None:
    shown = Terminal(height=24, lines_above=28).lines(
        state(endpoints=[READY] * 4, decisions=[decided(i) for i in range(50)])
    )

    assert sum("/v1/chat/completions" in line for line in shown) == 7


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/v1/[/x]", "/v1/[/x]"),
        ("/v1/[bold]x", "/v1/[bold]x"),
        ("/v1/models?api_key=secret", "/v1/models"),
        ("/\x1b[31mred\r\n\u202e", "/[31mred"),
        ("/" + "a" * 100, "/" + "a" * 58 + "…"),
        ("/:smile:", "/:smile:"),
    ],
)
def test_a_path_is_shown_as_text_without_query_control_characters_and_what_is_beyond_60(path: str, shown: str) -> None:
    decision = msgspec.structs.replace(PICKED, path=path)

    assert Terminal(width=120).lines(state(decisions=[decision]))[6].split("127.0.0.1:8101  ")[1] == shown
    assert decision_line(decision, zone=UTC).split(" ")[1] == shown


def test_an_ipv6_address_keeps_its_brackets() -> None:
    pod = msgspec.structs.replace(READY, address="[fe80::1]:8000")
    decision = msgspec.structs.replace(PICKED, endpoint="[fe80::1]:8000")

    shown = Terminal().lines(state(endpoints=[pod], decisions=[decision]))

    assert shown[1].split()[0] == "[fe80::1]:8000"
    assert shown[4] == "22:13:20    96/120  [fe80::1]:8000  /v1/chat/completions"


def test_reasons_and_states_are_no_markup_either() -> None:
    pod = msgspec.structs.replace(READY, state="[/odd]")
    decision = msgspec.structs.replace(SHED, reasons=("malformed-json: [/x] expected",), degraded=("[/y]",))

    shown = "\n".join(Terminal().lines(state(endpoints=[pod], decisions=[decision])))

    assert [text in shown for text in ("[/odd]", "[/x] expected", "degraded: [/y]")] == [True] * 3


def test_reasons_that_are_long_take_two_lines_and_are_cut_there() -> None:
    decision = msgspec.structs.replace(PICKED, reasons=("word " * 60,))

    shown = Terminal().lines(state(decisions=[decision]))

    assert len(shown) == 10
    assert shown[-2].endswith("…")


def test_the_widest_numbers_and_addresses_fit_80_columns_in_one_line_each() -> None:
    pod = EndpointState(
        address="[2001:db8:1111:2222:3333:4444:5555:6666]:8000", state="unreachable", cached_blocks=1_234_567,
        running=1000, waiting=1000, kv_usage=1.0, hit_rate=1.0, picks=99_999, share=1.0,
    )  # fmt: skip

    for role in ("both", "prefill"):
        pods = [msgspec.structs.replace(pod, role=role)] * 3
        assert len(Terminal().lines(state(endpoints=pods, decisions=[]))) == 1 + 3 + 1 + 3


def test_a_time_that_is_none_is_shown_as_such() -> None:
    assert decision_line(msgspec.structs.replace(PICKED, at=1e300), zone=UTC).startswith("--:--:-- ")


def test_a_decision_is_one_plain_line_where_there_is_no_terminal() -> None:
    assert [decision_line(decision, zone=UTC) for decision in (PICKED, SHED)] == [
        "22:13:20 /v1/chat/completions -> 127.0.0.1:8101 96/120 prefix 0.80 × 3 queue-depth 1.00 × 2 kv-usage 0.97 × 1",
        "22:13:21 /v1/completions -> 503 0/0 shed: every endpoint is saturated degraded=prefix-index-timeout",
    ]

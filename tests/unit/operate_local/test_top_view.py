"""The live view of `kvmesh top` and `kvmesh up`: rendered without a terminal, in a pipe, and replicas added up."""

import json
import logging
from collections.abc import Sequence
from datetime import UTC
from io import StringIO

import msgspec
import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from extproc.pages.picker_state import (
    ClassState,
    DecisionState,
    EndpointState,
    IndexState,
    MeasuredState,
    PickerState,
    PoolState,
)
from kvmesh.output.forms import OutputForm
from operate.local.top_commands import SortBy, replica_urls
from operate.local.top_view import (
    Look,
    Replica,
    added_up,
    as_data,
    guarded,
    new_decisions,
    show_data,
    show_lines,
    show_pages,
    sorted_pods,
    top_page,
)

STATE = PickerState(
    now=1_700_000_002.0,
    endpoints=(EndpointState(address="10.0.0.1:8000", state="ready", cached_blocks=1234, running=2, waiting=1),),
    index=IndexState(state="ok", sources=1),
    decisions=(
        DecisionState(at=1_700_000_000.0, path="/v1/x", endpoint="10.0.0.1:8000", reasons=("prefix 1.00 × 3",)),
    ),
    classes=(ClassState(name="critical"), ClassState(name="sheddable", waiting=7, steps=("cap-output",))),
)
WELL = Replica(url="http://a:9090", state=STATE, heard_at=100.0)
LOST = Replica(url="http://b:9090", state=STATE, heard_at=80.0, problem="no answer in 2 s")
TOP = Look()
UP = Look(title="", closing="Ctrl-C ends everything", above=[Text("kvmesh is up")] * 10, is_full_screen=False)


def drawn(
    *replicas: Replica, state: PickerState | None = STATE, look: Look = TOP, width: int = 100, height: int = 24
) -> list[str]:
    console = Console(file=StringIO(), width=width, height=height)
    with console.capture() as capture:
        console.print(top_page(replicas, state, look, now=105.0, zone=UTC, width=width, height=height))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    return lines


def test_the_replicas_stand_above_the_page_that_kvmesh_up_shows() -> None:
    assert drawn(WELL, LOST) == [
        "kvmesh top    1 of 2 replicas connected",
        "http://b:9090: lost for 25 s, trying again: no answer in 2 s",
        "pod              state  blocks  run  wait  KV  hits   picks",
        "10.0.0.1:8000    ready   1,234    2     1   -     -  0   0%",
        "under pressure: sheddable 7 waiting, cap-output",
        "last decisions: tokens found in the cache, and why",
        "22:13:20       0/0  10.0.0.1:8000  /v1/x",
        "         prefix 1.00 × 3",
        "prefix index: ok, 1 sources    Ctrl-C leaves",
    ]


def test_what_is_old_is_called_old_where_nobody_answers() -> None:
    lines = drawn(LOST)

    assert lines[:3] == [
        "kvmesh top    0 of 1 replicas connected",
        "http://b:9090: lost for 25 s, trying again: no answer in 2 s",
        "what is shown below is old",
    ]
    assert lines[-1] == "prefix index: ok, 1 sources    Ctrl-C leaves"


def test_before_anybody_has_answered_there_is_only_what_is_tried() -> None:
    never = Replica(url="http://a:9090", problem="cannot connect")

    assert drawn(never, state=None) == [
        "kvmesh top    0 of 1 replicas connected",
        "http://a:9090: not heard yet, trying again: cannot connect",
    ]


def test_of_many_lost_replicas_the_first_are_named_and_the_page_still_fits() -> None:
    lost = [msgspec.structs.replace(LOST, url=f"http://r{number}:9090") for number in range(20)]

    lines = drawn(*lost, WELL, height=24)

    assert lines[0] == "kvmesh top    1 of 21 replicas connected"
    assert lines[8] == "and 13 more are lost"


def test_several_pools_are_listed_in_short() -> None:
    pools = tuple(PoolState(pool=f"llm/{name}", endpoints=2, ready=1, open_requests=3) for name in "abcdefgh")
    state = PickerState(now=1.0, pool=None, pools=pools)

    assert drawn(msgspec.structs.replace(WELL, state=state), state=state, height=8) == [
        "kvmesh top    1 of 1 replicas connected",
        "pool   ready  open  waiting",
        "llm/a    1/2     3        0",
        "llm/b    1/2     3        0",
        "llm/c    1/2     3        0",
        "llm/d    1/2     3        0",
        "and 4 more",
        "--pool NAMESPACE/NAME shows one of them    Ctrl-C leaves",
    ]


@pytest.mark.parametrize("column", SortBy)
def test_pods_are_sorted_by_a_column_highest_first_and_unknown_last(column: SortBy) -> None:
    few, many = (
        EndpointState(
            address=f"10.0.0.{value}:8000",
            state="ready",
            cached_blocks=value,
            running=value,
            waiting=value,
            kv_usage=value / 10,
            hit_rate=value / 10,
            picks=value,
        )
        for value in (1, 2)
    )
    unknown = EndpointState(address="10.0.0.3:8000", state="unreachable")

    assert sorted_pods([unknown, few, many], column) == [many, few, unknown]
    assert sorted_pods([unknown, few, many], None) == [unknown, few, many]


def test_control_characters_of_a_replicas_words_reach_no_terminal() -> None:
    lines = drawn(Replica(url="http://a:9090", problem="\x1b[31mred\n[bold]x"), state=None)

    assert lines[1] == "http://a:9090: not heard yet, trying again: [31mred [bold]x"


def test_in_a_pipe_each_decision_and_each_trouble_comes_once() -> None:
    console = Console(file=StringIO(), width=200)
    show = show_lines(console, zone=UTC)

    for replicas in ([WELL], [WELL], [LOST], [LOST], [WELL]):
        show(replicas, STATE, 105.0)

    assert written(console).splitlines() == [
        "22:13:20 /v1/x -> 10.0.0.1:8000 0/0 prefix 1.00 × 3",
        "http://b:9090: lost for 25 s, trying again: no answer in 2 s",
    ]


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


FIRST = DecisionState(at=1_700_000_000.0, path="/v1/[/x]", endpoint="[fe80::1]:8000")
SECOND = DecisionState(at=1_700_000_001.0, path="/v1/completions", endpoint=None, status=503)


def test_in_a_pipe_words_of_clients_are_no_markup() -> None:
    console = Console(file=StringIO(), width=80)
    show = show_lines(console, zone=UTC)

    show([msgspec.structs.replace(LOST, problem="gone [/x]")], None, 105.0)
    for decisions in ((FIRST,), (SECOND, FIRST)):
        show([], msgspec.structs.replace(STATE, decisions=decisions), 105.0)

    assert written(console).splitlines() == [
        "http://b:9090: lost for 25 s, trying again: gone [/x]",
        "22:13:20 /v1/[/x] -> [fe80::1]:8000 0/0",
        "22:13:21 /v1/completions -> 503 0/0",
    ]


def test_only_decisions_that_were_not_printed_yet_are_new_oldest_first() -> None:
    assert new_decisions((SECOND, FIRST), after=0) == [FIRST, SECOND]
    assert new_decisions((SECOND, FIRST), after=FIRST.at) == [SECOND]


def test_a_path_of_brackets_is_drawn_on_a_terminal() -> None:
    console = Console(file=StringIO(), width=80, height=24, force_terminal=True, color_system=None)
    with Live(console=console, auto_refresh=False) as live:
        show_pages(live, UP, zone=UTC)([WELL], msgspec.structs.replace(STATE, decisions=[FIRST]), 105.0)

    assert "[fe80::1]:8000  /v1/[/x]" in written(console)


def test_the_view_of_kvmesh_up_leaves_the_greeting_in_sight_and_names_its_picker_only_when_it_is_lost() -> None:
    state = msgspec.structs.replace(STATE, decisions=[FIRST] * 20)
    well = drawn(WELL, state=state, look=UP)

    assert len(well) == 24 - len(UP.above)
    assert well[0].startswith("pod ")
    assert well[-1] == "prefix index: ok, 1 sources    Ctrl-C ends everything"
    assert drawn(LOST, look=UP)[:2] == [
        "http://b:9090: lost for 25 s, trying again: no answer in 2 s",
        "what is shown below is old",
    ]


def test_what_cannot_be_drawn_is_logged_once_and_becomes_a_plain_line_and_the_view_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drawn: list[str] = []

    def draw(replicas: Sequence[Replica], state: PickerState | None, now: float) -> None:
        if not replicas:
            raise ValueError("no\nway")
        drawn.append("state")

    show = guarded(draw, tell=drawn.append)
    with caplog.at_level(logging.WARNING):
        for replicas in ([], [], [WELL]):
            show(replicas, STATE, 105.0)

    problem = "the state cannot be shown: ValueError: no way"
    assert drawn == [problem, problem, "state"]
    assert [record.getMessage() for record in caplog.records] == ["the live view cannot be drawn"]


def test_a_terminal_that_takes_nothing_any_more_does_not_end_the_view() -> None:
    def draw(*_: object) -> None:
        raise OSError("Input/output error")

    def tell(_: str) -> None:
        raise OSError("Input/output error")

    guarded(draw, tell=tell)([WELL], STATE, 105.0)  # not raising is the behaviour


def test_json_is_one_document_a_line() -> None:
    console = Console(file=StringIO(), width=20)

    show_data(console, OutputForm.JSON)([WELL, LOST], STATE, 105.0)

    (line,) = written(console).splitlines()
    assert json.loads(line) == json.loads(msgspec.json.encode(as_data([WELL, LOST], STATE, now=105.0)))
    assert json.loads(line)["replicas"] == [
        {"url": "http://a:9090", "connected": True, "age_seconds": 5.0, "problem": None},
        {"url": "http://b:9090", "connected": False, "age_seconds": 25.0, "problem": "no answer in 2 s"},
    ]


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        (None, ["http://127.0.0.1:9090"]),
        (["http://a:1/", "b:2,https://c", "http://a:1"], ["http://a:1", "http://b:2", "https://c"]),
    ],
)
def test_addresses_may_be_repeated_or_separated_by_commas(given: list[str] | None, urls: list[str]) -> None:
    assert replica_urls(given) == urls


ONE, OTHER = "http://a:9090", "http://b:9090"
OLD = PickerState(
    now=100.0,
    endpoints=(
        EndpointState(
            address="p:1", state="ready", cached_blocks=10, running=1, waiting=2, bookings=3, picks=6, share=1
        ),
        EndpointState(address="p:2", state="ready"),
    ),
    index=IndexState(state="ok", sources=2),
    decisions=(DecisionState(at=99.0, endpoint="p:1"), DecisionState(at=97.0, endpoint="p:1")),
    classes=(
        ClassState(name="critical", waiting=1, attainment=0.5, judged=10),
        ClassState(name="sheddable", waiting=4, steps=("reject",)),
    ),
)
NEW = PickerState(
    now=101.0,
    endpoints=(
        EndpointState(address="p:1", state="unknown", cached_blocks=12, bookings=1, picks=2, share=1.0),
        EndpointState(address="p:3", state="ready", picks=2),
    ),
    index=IndexState(state="stale", sources=3),
    decisions=(DecisionState(at=98.0, endpoint="p:3"),),
    classes=(
        ClassState(name="critical", attainment=0.9, judged=30),
        ClassState(name="sheddable", waiting=1, steps=("cap-output", "reject")),
    ),
)


def heard(url: str, state: PickerState, *, at: float) -> Replica:
    return Replica(url=url, state=state, heard_at=at)


def test_what_each_counts_is_summed_and_what_all_see_is_taken_from_the_newest_or_the_worst() -> None:
    assert added_up([heard(ONE, OLD, at=1.0), heard(OTHER, NEW, at=2.0)]) == PickerState(
        now=101.0,
        endpoints=(
            EndpointState(
                address="p:1", state="unknown", cached_blocks=12, running=1, waiting=2, bookings=4, picks=8, share=0.8
            ),
            EndpointState(address="p:3", state="ready", picks=2, share=0.2),
            EndpointState(address="p:2", state="ready"),
        ),
        index=IndexState(state="stale", sources=3),
        decisions=(
            DecisionState(at=99.0, endpoint="p:1"),
            DecisionState(at=98.0, endpoint="p:3"),
            DecisionState(at=97.0, endpoint="p:1"),
        ),
        classes=(
            ClassState(name="critical", waiting=1, attainment=0.8, judged=40),
            ClassState(name="sheddable", waiting=5, steps=("cap-output", "reject")),
        ),
    )


def test_a_lost_replica_counts_with_what_it_said_last_and_its_age_is_told() -> None:
    lost = msgspec.structs.replace(heard(ONE, OLD, at=10.0), problem="no answer in 2 s")

    assert added_up([lost]) == OLD
    assert lost.line(now=22.4) == "http://a:9090: lost for 12 s, trying again: no answer in 2 s"


def test_a_replica_that_never_answered_adds_nothing() -> None:
    never = Replica(url=OTHER, problem="refused")

    assert added_up([heard(ONE, OLD, at=1.0), never]) == OLD
    assert added_up([never]) is None
    assert never.line(now=5.0) == "http://b:9090: not heard yet, trying again: refused"


def test_of_several_pools_the_open_and_waiting_requests_are_summed() -> None:
    first = PickerState(now=1.0, pool=None, pools=(PoolState(pool="llm/a", endpoints=2, ready=2, open_requests=1),))
    second = PickerState(
        now=2.0, pool=None, pools=(PoolState(pool="llm/a", endpoints=2, ready=1, open_requests=4, waiting=2),)
    )

    found = added_up([heard(ONE, first, at=1.0), heard(OTHER, second, at=2.0)])

    assert found is not None
    assert found.pools == (PoolState(pool="llm/a", endpoints=2, ready=1, open_requests=5, waiting=2),)


@pytest.mark.parametrize(
    ("attainment", "judged", "line"),
    [
        (0.9, 20, ["under pressure: critical 0 waiting, 90.0% within its targets"]),
        (0.9, 19, []),  # too few to say so
        (0.99, 500, []),
        (None, 0, []),
    ],
)
def test_a_class_that_misses_its_objective_is_named(attainment: float | None, judged: int, line: list[str]) -> None:
    classes = (ClassState(name="critical", objective=0.99, attainment=attainment, judged=judged),)
    lines = drawn(WELL, state=msgspec.structs.replace(STATE, classes=classes))
    assert [each for each in lines if each.startswith("under pressure")] == line


def test_ttft_is_of_one_replica_always_the_same_whichever_answered_last() -> None:
    def measured(count: float) -> PickerState:
        return PickerState(now=9.0, ttft=MeasuredState(bounds=(0.1,), counts=(count, 0.0)))

    for at in (1.0, 3.0):
        found = added_up([heard(ONE, measured(500.0), at=at), heard(OTHER, measured(90_000.0), at=2.0)])
        assert found is not None
        assert found.ttft.counts == (90_000.0, 0.0)
    lost = msgspec.structs.replace(heard(OTHER, measured(90_000.0), at=2.0), problem="refused")
    found = added_up([heard(ONE, measured(500.0), at=1.0), lost])
    assert found is not None
    assert found.ttft.counts == (500.0, 0.0)

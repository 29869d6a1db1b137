"""Each check judges facts alone: what is no misconfiguration is no finding, what is one is named with its fix."""

from dataclasses import replace

import pytest

from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pages.findings import Finding, Severity, error, exit_code, unchecked, warning
from extproc.pods.endpoint import EndpointModels
from kvmesh.blocks.source import NOT_FOLLOWED, SourceState
from operate.doctor.checks import CHECKS, judge
from operate.doctor.facts import (
    Facts,
    IndexerFacts,
    IndexerFinding,
    PickerFacts,
    TrialFacts,
)
from tests.unit.operate_doctor.doctor_facts import (
    NOW,
    POD,
    PUBLISHER,
    SOURCE,
    TINY,
    facts,
    found,
    index,
    lines,
    pod,
    redis,
)


def test_a_mesh_in_which_all_is_well_has_ok_findings_only() -> None:
    assert {finding.severity for finding in judge(facts())} == {Severity.OK}


def test_errors_go_before_what_could_not_be_checked_and_warnings_are_no_failure() -> None:
    bad, dark, mild = error("a", "b", fix="c"), unchecked("a", "b", fix="c"), warning("a", "b", fix="c")

    assert [exit_code(each) for each in ([dark, bad, mild], [mild, dark], [mild], [])] == [1, 2, 0, 0]


def test_every_finding_that_is_not_ok_says_what_to_do() -> None:
    broken = facts(pod(problem="refused"), redis=redis(problem="away"), index=index(problem="away"))

    assert [finding.check for finding in judge(broken) if finding.severity is not Severity.OK] == [
        "pods-answer",
        "redis-answers",
    ]
    assert all(finding.fix for finding in judge(broken) if finding.severity is not Severity.OK)


def test_a_defect_of_one_check_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def defective(_: Facts) -> list[Finding]:
        raise KeyError("surprise")

    monkeypatch.setitem(CHECKS, "clocks", replace(CHECKS["clocks"], judge=defective))
    severities = {finding.check: finding.severity for finding in judge(facts())}

    assert severities.pop("clocks") is Severity.UNCHECKED
    assert set(severities.values()) == {Severity.OK}


def test_what_could_not_be_compared_is_not_called_fine() -> None:
    dark = facts(
        pod(problem="refused", clock_ahead_seconds=None),
        redis=redis(problem="away"),
        index=index(problem="away"),
        picker=PickerFacts(url="http://p", problem="refused"),
    )

    assert [finding.check for finding in judge(dark) if finding.severity is Severity.OK] == []


def test_no_endpoints_are_an_error() -> None:
    nobody = replace(facts(), pods=(), expected=replace(facts().expected, endpoints=()))

    assert lines("pods-answer", nobody) == [("error", "endpoints", "no endpoint is configured")]


# models ---------------------------------------------------------------------------------------------------------------


def test_an_alias_of_the_settings_is_no_unknown_name() -> None:
    aliased = ModelTable(served=(ServedModel(name="tiny", aliases=frozenset({"small"})),))
    both = pod(served=EndpointModels(models=frozenset({"tiny", "small"}), adapters={}))
    seen = facts(both)

    assert found("models-served", replace(seen, expected=replace(seen.expected, models=aliased))) == []


def test_a_model_that_no_pod_serves_is_found_once() -> None:
    seen = facts()
    two = ModelTable(served=(TINY, ServedModel(name="big")))

    assert lines("models-served", replace(seen, expected=replace(seen.expected, models=two))) == [
        ("error", "big", "none of 1 pods serves it")
    ]


def test_a_context_length_that_differs_from_the_pods_is_found() -> None:
    seen = facts()
    longer = ModelTable(served=(replace(TINY, max_model_len=8192),))

    assert lines("models-served", replace(seen, expected=replace(seen.expected, models=longer))) == [
        ("warning", POD, "takes 4096 tokens of tiny, and `maxModelLen` says 8192")
    ]


@pytest.mark.parametrize("version", ["0.8.5", "0.22.1", "0.32.0+cpu", "v0.33.1rc2.dev7", "1.0.0"])
def test_versions_that_are_known_or_newer_are_fine(version: str) -> None:
    assert found("vllm-version", facts(pod(version=version))) == []


def test_pods_of_different_versions_are_found() -> None:
    other = pod(endpoint="10.0.0.2:8000", version="0.31.0")

    assert lines("vllm-version", facts(pod(), other)) == [
        ("warning", "pods", "run different versions: 0.32.0 on 10.0.0.1:8000; 0.31.0 on 10.0.0.2:8000")
    ]


def test_a_pod_that_does_not_say_whether_it_caches_is_not_checked() -> None:
    assert [finding.severity for finding in found("prefix-caching", facts(pod(prefix_caching=None)))] == [
        Severity.UNCHECKED
    ]


def test_another_engine_is_not_asked_what_only_vllm_says() -> None:
    seen = facts(pod(is_vllm=False, version=None, prefix_caching=None))
    checked = {finding.check for finding in judge(seen)}
    assert "pods-answer" in checked
    assert not checked & {"vllm-version", "prefix-caching"}


def test_fetches_as_long_as_a_lease_are_found() -> None:
    assert found("kv-fetches", facts(pod(fetch_seconds=0.2))) == []
    assert lines("kv-fetches", facts(pod(fetch_seconds=12.4))) == [
        ("warning", POD, "a fetch of a prompt's blocks from a prefill pod takes 12 s")
    ]
    assert "kv-fetches" not in {finding.check for finding in judge(facts())}


@pytest.mark.parametrize(("status", "named"), [(403, "--enable-scale-out"), (404, "render endpoints"), (0, "0.31")])
def test_a_model_whose_prompts_pods_must_render_needs_them_to(status: int, named: str) -> None:
    seen = facts(pod(render_status={"tiny": status}))
    rendered = ModelTable(served=(replace(TINY, tokens_from=TokensFrom.RENDER),))
    [finding] = found("render", replace(seen, expected=replace(seen.expected, models=rendered)))

    assert finding.severity is Severity.ERROR
    assert named in finding.fix


@pytest.mark.parametrize(
    ("render", "tokenize", "told"),
    [
        ((200, 200), (200, 200), []),
        ((403, 200), (200, 0), [(Severity.OK, "tiny", "10.0.0.1:8000: tokenize")]),
        ((403, 200), (401, 200), [(Severity.ERROR, "10.0.0.1:8000", "other pods are asked")]),
        (
            (403, 0),
            (404, 0),
            [
                (Severity.ERROR, "10.0.0.1:8000", "neither renders (403) nor tokenizes (404)"),
                (Severity.ERROR, "10.0.0.2:8000", "no pod does, it is routed on text only"),
            ],
        ),
    ],
)
def test_pods_of_a_model_without_a_folder_need_to_render_or_to_tokenize(
    render: tuple[int, int], tokenize: tuple[int, int], told: list[tuple[Severity, str, str]]
) -> None:
    asked = zip(("10.0.0.1:8000", "10.0.0.2:8000"), render, tokenize, strict=True)
    seen = facts(
        *(
            pod(endpoint=endpoint, render_status={"tiny": rendered}, tokenize_status={"tiny": tokenized})
            for endpoint, rendered, tokenized in asked
        )
    )
    findings = found("render", seen)
    assert [(each.severity, each.subject) for each in findings] == [
        (severity, subject) for severity, subject, _ in told
    ]
    assert all(words in each.seen for each, (_, _, words) in zip(findings, told, strict=True))
    assert all("tokenizer" in each.fix for each in findings if each.severity is Severity.ERROR)


def test_a_model_that_is_to_be_routed_on_text_is_said() -> None:
    plain = facts()
    text = ModelTable(served=(replace(TINY, tokens_from=TokensFrom.TEXT),))
    [finding] = found("render", replace(plain, expected=replace(plain.expected, models=text)))
    assert (finding.severity, finding.subject) == (Severity.WARNING, "tiny")


# events ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5557", "tcp://localhost:5557", "tcp://[::1]:5557"])
def test_an_events_address_that_only_the_pod_reaches_is_found(address: str) -> None:
    [finding] = found("event-publisher", facts(pod(publishers=(replace(PUBLISHER, events=address),))))

    assert (finding.severity, finding.seen) == (
        Severity.ERROR,
        f"publishes at {address}, which only its own machine reaches",
    )


def test_a_loopback_address_is_fine_on_one_machine() -> None:
    local = pod(endpoint="127.0.0.1:8000", publishers=(replace(PUBLISHER, events="tcp://127.0.0.1:5557"),))

    assert found("event-publisher", facts(local)) == []


def test_another_publisher_than_zmq_is_found() -> None:
    assert lines("event-publisher", facts(pod(publishers=(replace(PUBLISHER, kind="null"),)))) == [
        ("error", POD, "its KV events go to the publisher 'null'")
    ]


def test_one_rank_of_several_that_publishes_nothing_is_named() -> None:
    ranks = (replace(PUBLISHER, events="tcp://*:5557"), replace(PUBLISHER, rank="1", enabled=False))

    assert lines("event-publisher", facts(pod(publishers=ranks))) == [
        ("error", f"{POD}#1", "this rank publishes no KV events")
    ]


def test_wildcards_of_different_pods_are_different_addresses() -> None:
    assert found("event-publisher", facts(pod(), pod(endpoint="10.0.0.2:8000"))) == []


def test_an_old_vllm_is_fine_once_the_index_knows_its_events() -> None:
    old = pod(sources_status=404, publishers=())

    assert found("event-publisher", facts(old)) == []
    assert (
        "--event-sources" in found("event-publisher", facts(old, index=index(replace(SOURCE, endpoint="x:1"))))[0].fix
    )


@pytest.mark.parametrize(
    ("state", "severity"),
    [(SourceState.LOST, "error"), (SourceState.DEGRADED, "warning"), (SourceState.REPLAYING, "warning")],
)
def test_a_source_that_is_not_live_is_found(state: SourceState, severity: str) -> None:
    seen = facts(index=index(replace(SOURCE, state=state, reason="why")))

    assert [(how, subject) for how, subject, _ in lines("index-follows", seen)] == [(severity, f"{POD}#0")]


def test_a_pod_without_replay_is_said_once() -> None:
    degraded = index(replace(SOURCE, state=SourceState.DEGRADED, reason="no-replay-endpoint"))
    seen = facts(pod(publishers=(replace(PUBLISHER, replay=None),)), index=degraded)

    assert found("index-follows", seen) == []
    assert len(found("replay-socket", seen)) == 1


def test_records_that_nobody_can_read_are_found() -> None:
    [finding] = found("index-follows", facts(index=index(unreadable=("slot 3: unknown state",))))

    assert finding.seen == "1 records are not believed, the first: slot 3: unknown state"


def test_a_pod_that_has_served_prompts_and_never_sent_an_event_is_found() -> None:
    never = index(replace(SOURCE, last_seq=-1, last_batch_at=0.0, applied_at=0.0))

    assert lines("events-flow", facts(index=never)) == [
        ("error", POD, "has served 10000 prompt tokens, and no event has ever come")
    ]
    assert found("events-flow", facts(pod(prompt_tokens=10), index=never)) == []


def test_a_busy_pod_whose_events_have_stopped_is_found_and_an_idle_one_is_not() -> None:
    old = index(replace(SOURCE, last_batch_at=NOW - 1000))

    assert [how for how, _, _ in lines("events-flow", facts(pod(running=3), index=old))] == ["warning"]
    assert found("events-flow", facts(pod(running=0), index=old)) == []


@pytest.mark.parametrize(
    ("trial", "seen", "fix"),
    [
        (TrialFacts(endpoint=POD, model="tiny", tokens=49, matched_tokens=48), None, ""),
        (
            TrialFacts(endpoint=POD, model="tiny", tokens=49, waited_seconds=3.0),
            "a prompt of tiny (49 tokens) was served, and no event came within 3.0 s",
            "--kv-events-config",
        ),
        (
            TrialFacts(endpoint=POD, model="tiny", tokens=49, batches=2),
            "events came of a prompt of tiny (49 tokens), but the index does not have it under the picker's keys",
            "--hash-seed kvmesh and --model tiny",
        ),
        (
            TrialFacts(endpoint=POD, model="tiny", tokens=49, matched_tokens=48, picker_tokens=0),
            "the index holds a prompt of tiny that the running picker does not find there",
            "give the running picker --hash-seed kvmesh",
        ),
    ],
)
def test_what_becomes_of_a_fresh_prompt_tells_where_the_chain_breaks(
    trial: TrialFacts, seen: str | None, fix: str
) -> None:
    findings = found("same-keys", facts(trials=(trial,)))

    assert [finding.seen for finding in findings] == ([] if seen is None else [seen])
    assert all(fix in finding.fix for finding in findings)


def test_where_no_indexer_is_alive_there_is_one_error_and_nothing_is_called_fine_that_needs_one() -> None:
    """The records that it left are old, and what they say of the pods is its own doing."""
    two = pod(), pod(endpoint="10.0.0.2:8000", running=3)
    left = [
        replace(SOURCE, endpoint=each.endpoint, state=SourceState.LOST, reason=NOT_FOLLOWED, last_batch_at=NOW - 1000)
        for each in two
    ]
    trials = tuple(TrialFacts(endpoint=each.endpoint, model="tiny", tokens=49) for each in two)
    seen = facts(*two, index=index(*left, indexer_alive=False), trials=trials)

    assert [
        (each.check, each.severity.value, each.subject, each.seen)
        for each in judge(seen)
        if each.severity is not Severity.OK
    ] == [
        ("index-follows", "error", "index", "no indexer is alive: the index stands still"),
        ("events-flow", "unchecked", "index", "not checked: no indexer is alive"),
        ("same-keys", "unchecked", "index", "not checked: no indexer is alive"),
    ]


def test_what_an_index_without_an_indexer_still_shows_of_a_prompt_is_judged() -> None:
    other = TrialFacts(endpoint=POD, model="tiny", tokens=49, found_as=("other", "tiny"))

    assert [how for how, _, _ in lines("same-keys", facts(index=index(indexer_alive=False), trials=(other,)))] == [
        "error"
    ]


@pytest.mark.parametrize("reason", ["", "unreachable"])
def test_a_prompt_of_a_pod_that_is_not_followed_is_not_checked(reason: str) -> None:
    lost = index(replace(SOURCE, state=SourceState.LOST, reason=reason))
    seen = facts(index=lost, trials=(TrialFacts(endpoint=POD, model="tiny", tokens=49),))
    expected = [("unchecked", POD, "not checked: the index does not follow it, or not yet")]

    assert lines("same-keys", seen) == lines("events-flow", seen) == expected


def test_a_pod_that_living_indexers_have_left_is_no_pod_whose_ports_are_closed() -> None:
    [finding] = found("index-follows", facts(index=index(replace(SOURCE, state=SourceState.LOST, reason=NOT_FOLLOWED))))

    assert (finding.subject, finding.seen) == (POD, "no indexer follows it: the index does not know it")
    assert "--endpoints" in finding.fix


def test_what_the_indexers_have_found_is_passed_on_with_its_page() -> None:
    theirs = IndexerFinding(endpoint=f"{POD}#0", reason="no-events", message="nothing comes")
    [finding] = found("indexer-findings", facts(indexer=IndexerFacts(url="http://i", findings=(theirs,))))

    assert (finding.severity, finding.subject, finding.seen) == (
        Severity.ERROR,
        f"{POD}#0",
        "no-events: nothing comes",
    )
    assert finding.fix == "see docs/reference/findings.md, no-events"


# clocks and redis -----------------------------------------------------------------------------------------------------


def test_clocks_a_few_seconds_apart_are_fine_and_more_is_found() -> None:
    apart = facts(
        pod(clock_ahead_seconds=-60.0),
        redis=redis(clock_ahead_seconds=30.0),
        index=index(replace(SOURCE, last_batch_at=NOW, applied_at=NOW - 20)),
    )

    assert found("clocks", facts(pod(clock_ahead_seconds=3.0), redis=redis(clock_ahead_seconds=-3.0))) == []
    assert [(subject, seen) for _, subject, seen in lines("clocks", apart)] == [
        (POD, "its clock is 60 s behind this machine's"),
        ("redis", "its clock is 30 s ahead of this machine's"),
        (POD, "the clock in its events is 20 s ahead of Redis'"),
    ]


def test_events_that_were_replayed_late_are_no_clock_that_is_behind() -> None:
    assert found("clocks", facts(index=index(replace(SOURCE, last_batch_at=NOW - 5000, applied_at=NOW)))) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": "6.2.0"}, []),
        ({"version": "6.0.16"}, [("error", "is Redis 6.0.16")]),
        ({"version": "8.0.1", "is_valkey": True}, []),
        ({"version": ""}, [("unchecked", "does not tell its version")]),
        (
            {"role": "slave"},
            [("warning", "is a replica: the index may be late, and replicas of the picker cannot share their load")],
        ),
    ],
)
def test_redis_must_be_new_enough_and_a_master(changes: dict[str, object], expected: list[tuple[str, str]]) -> None:
    seen = facts(redis=redis(**changes))

    assert [(how, what) for how, _, what in lines("redis-answers", seen)] == expected


def test_an_eviction_policy_counts_as_error_once_there_is_a_limit() -> None:
    lru = redis(maxmemory_policy="allkeys-lru")

    assert [how for how, *_ in lines("redis-memory", facts(redis=lru))] == ["warning"]
    assert [how for how, *_ in lines("redis-memory", facts(redis=replace(lru, maxmemory_bytes=1 << 30)))] == ["error"]
    assert [how for how, *_ in lines("redis-memory", facts(redis=redis(maxmemory_policy="")))] == ["unchecked"]


@pytest.mark.parametrize(("seconds", "expected"), [(0.001, []), (0.015, ["warning"]), (0.03, ["error"])])
def test_round_trips_are_measured_against_what_a_pick_waits(seconds: float, expected: list[str]) -> None:
    assert [how for how, *_ in lines("redis-latency", facts(redis=redis(round_trip_seconds=seconds)))] == expected


# picker ---------------------------------------------------------------------------------------------------------------


def test_a_picker_that_is_not_ready_or_has_no_index_is_found() -> None:
    picker = PickerFacts(
        url="http://p",
        endpoints=frozenset({POD}),
        index_problem="no indexer is alive",
        grpc_address="p:9002",
        grpc_health="NOT_SERVING",
    )

    assert lines("picker-answers", facts(picker=picker)) == [
        ("error", "http://p", "is not ready"),
        ("error", "p:9002", "its gRPC health is NOT_SERVING"),
        ("error", "http://p", "its index: no indexer is alive"),
    ]
    assert found("picker-endpoints", facts(picker=picker)) == []

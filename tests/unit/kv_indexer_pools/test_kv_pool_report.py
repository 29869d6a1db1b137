"""How pools stand, on /pools and in metrics."""

from kv_indexer.pools.members import PodAnswer, PoolFeed, membership
from kv_indexer.pools.pool_report import (
    EndpointReport,
    IndexFacts,
    PoolReport,
    PoolsReport,
    StreamReport,
    pools_report,
)
from kv_indexer.telemetry.indexer_telemetry import PrometheusTelemetry, pool_metrics
from kvmesh.blocks.findings import Finding
from kvmesh.blocks.source import Registry, SlotRecord, SourceState, Stream, StreamRecord
from kvmesh.documents.documents import DocumentProblem
from kvmesh.documents.pools import Pool, PoolEndpoint
from kvmesh.metrics.registry import Registry as MetricRegistry

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
OURS, THEIRS = Stream(endpoint=A), Stream(endpoint=B)


def slot(number: int, stream: Stream, blocks: int) -> SlotRecord:
    return SlotRecord(
        slot=number, endpoint=stream.endpoint, dp_rank=0, tier="GPU", epoch=1, block_size=16, blocks=blocks
    )


def answer(pool: str) -> PodAnswer:
    return PodAnswer(asked_at=0.0, ranks={0: PoolFeed(events="tcp://a:1", pool=pool, model="tiny")})


def test_a_pool_shows_its_endpoints_their_streams_and_what_is_wrong() -> None:
    red = Pool(name="llm/red", kind="InferencePool", endpoints=(PoolEndpoint(address=A, pod="llm/a"),))
    blue = Pool(name="llm/blue", kind="Service", endpoints=(PoolEndpoint(address=A), PoolEndpoint(address=B)))
    record = StreamRecord(
        endpoint=B, dp_rank=0, epoch=1, last_seq=3, last_ts=0.0, state=SourceState.LIVE, reason="", owner="other-1"
    )
    facts = IndexFacts(
        answers={A: answer("llm/red"), B: answer("llm/blue")},
        states={OURS: (SourceState.DEGRADED, "no-replay-endpoint")},
        held=[OURS],
        registry=Registry(version=b"1", streams=(record,), slots=(slot(0, OURS, 7), slot(1, THEIRS, 2))),
        findings=[Finding(endpoint=A, dp_rank=0, reason="no-events", message="", since=0.0)],
    )

    report = pools_report(membership([red, blue]), facts)

    of_red = EndpointReport(
        address=A,
        pod="llm/a",
        ready=True,
        terminating=False,
        indexed_for="llm/red",
        model="tiny",
        streams=(
            StreamReport(
                dp_rank=0, state="degraded", reason="no-replay-endpoint", followed_here=True, blocks={"GPU": 7}
            ),
        ),
        findings=("no-events",),
    )
    elsewhere = EndpointReport(address=A, pod="", ready=True, terminating=False, indexed_for="llm/red", model=None)
    of_blue = EndpointReport(
        address=B,
        pod="",
        ready=True,
        terminating=False,
        indexed_for="llm/blue",
        model="tiny",
        streams=(StreamReport(dp_rank=0, state="live", reason="", followed_here=False, blocks={"GPU": 2}),),
    )
    assert report == PoolsReport(
        pools=(
            PoolReport(name="llm/blue", kind="Service", model=None, models=("tiny",), endpoints=(elsewhere, of_blue)),
            PoolReport(name="llm/red", kind="InferencePool", model=None, models=("tiny",), endpoints=(of_red,)),
        ),
        conflicts=1,
    )


def metrics(report: PoolsReport) -> list[str]:
    registry = MetricRegistry()
    registry.read(lambda: pool_metrics(report))
    return [line for line in registry.text().decode().splitlines() if not line.startswith("#")]


def standing(name: str) -> PoolReport:
    endpoint = EndpointReport(
        address=A, pod="", ready=True, terminating=False, indexed_for=name, model=None, findings=("no-events",)
    )
    return PoolReport(name=name, kind="Service", model=None, models=(), endpoints=(endpoint,))


def test_each_endpoint_has_a_series_with_its_pool_and_problems_one_a_reason() -> None:
    problem = DocumentProblem(reason="pool-invalid", where="InferencePool llm/red", words="…")
    assert metrics(PoolsReport(pools=(standing("llm/red"),), conflicts=2, problems=(problem,))) == [
        f'kvmesh_indexer_pool_endpoint_info{{endpoint="{A}",pool="llm/red"}} 1.0',
        "kvmesh_indexer_pool_conflicts 2.0",
        'kvmesh_indexer_pool_problems{reason="pool-invalid"} 1.0',
    ]


def test_an_endpoint_that_has_left_leaves_no_series_behind_even_if_its_follower_ends_later() -> None:
    telemetry = PrometheusTelemetry()
    for stream in (OURS, THEIRS):
        telemetry.state(stream, state=SourceState.LIVE, reason="")
        telemetry.applied(stream, batches=1, events={"BlockStored": 1}, last_ts=0.0)
        telemetry.gap(stream)
    telemetry.findings([], appeared=[], endpoints=[A, B])

    telemetry.forget_endpoints([A])
    telemetry.applied(OURS, batches=1, events={}, last_ts=0.0)  # a last word
    telemetry.state(OURS, state=SourceState.LOST, reason="unreachable")
    telemetry.forget(OURS)

    text = telemetry.render().decode()
    assert A not in text
    assert text.count(B) > 0

    telemetry.findings([], appeared=[], endpoints=[A, B])  # another pod has got the address
    telemetry.applied(OURS, batches=2, events={}, last_ts=0.0)
    telemetry.forget(OURS)
    assert f'kvmesh_indexer_batches_total{{dp_rank="0",endpoint="{A}"}} 2.0' in telemetry.render().decode()

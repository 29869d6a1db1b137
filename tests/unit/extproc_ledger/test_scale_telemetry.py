"""Signals as metrics, and the tokens of classes that they are made from."""

from extproc.ledger.endpoint_telemetry import show_scale
from extproc.ledger.feature_telemetry import OverloadTelemetry
from extproc.policy.priority import DEFAULT_CLASSES
from extproc.scaling.seen import Costs, Signal, Source, State, VariantSignal
from kvmesh.metrics.registry import Registry


def test_a_signal_has_its_numbers_and_its_state() -> None:
    registry = Registry()
    signal = Signal(
        role="decode",
        wanted=5,
        told=3,
        ready=2,
        present=3,
        state=State.NONSENSE_REPORTS,
        saturation=1.5,
        decode_busy=3.0,
        queued_tokens=700.0,
        input_tokens_per_second=10.0,
        cached_tokens_per_second=20.0,
        output_tokens_per_second=30.0,
    )
    show_scale(registry, lambda: {"decode": signal})
    lines = [line.rsplit(" ", 1) for line in registry.text().decode().splitlines() if not line.startswith("#")]
    assert {name: float(value) for name, value in lines} == {
        'kvmesh_wanted_replicas{role="decode"}': 5,
        'kvmesh_scale_to_replicas{role="decode"}': 3,
        'kvmesh_ready_replicas{role="decode"}': 2,
        'kvmesh_saturation_ratio{role="decode"}': 1.5,
        'kvmesh_busy_pods{role="decode",work="decode"}': 3,
        'kvmesh_queued_prompt_tokens{role="decode"}': 700,
        'kvmesh_tokens_per_second{kind="input",role="decode"}': 10,
        'kvmesh_tokens_per_second{kind="cached",role="decode"}': 20,
        'kvmesh_tokens_per_second{kind="output",role="decode"}': 30,
        **{
            f'kvmesh_scale_state{{role="decode",state="{state.value}"}}': state is State.NONSENSE_REPORTS
            for state in State
        },
    }


def test_refused_requests_count_as_their_classs_average() -> None:
    registry = Registry()
    overload = OverloadTelemetry(registry, classes=DEFAULT_CLASSES)
    overload.shed("sheddable", reason="full")  # nothing is known of it yet
    overload.admitted("sheddable", uncached_tokens=300, cached_tokens=50)
    overload.admitted("sheddable", uncached_tokens=100)
    overload.shed("sheddable", reason="full")
    overload.found_no_pod()  # it would not have been refused for load
    assert (overload.refused_requests, overload.refused_tokens) == (3, 200.0)
    text = registry.text().decode()
    for part, tokens in (("uncached", 400), ("cached", 50), ("refused", 200)):
        assert f'kvmesh_class_prompt_tokens_total{{class="sheddable",part="{part}"}} {tokens}' in text


def test_variants_capacity_and_costs_are_shown_where_they_are_known() -> None:
    registry = Registry()
    variant = VariantSignal(
        name="h100",
        wanted=2,
        told=1,
        ready=1,
        present=1,
        pod_hour_price=4.0,
        prefill_tokens_per_second=9000.0,
        decode_tokens_per_second=None,
        source=Source.LEARNED,
    )
    costs = Costs(per_hour=4.0, per_million_tokens=0.5)
    signal = Signal(
        role="both",
        wanted=2,
        told=1,
        ready=1,
        present=1,
        prefill_busy=3.0,
        decode_busy=1.0,
        variants=(variant,),
        costs=costs,
    )
    show_scale(registry, lambda: {"both": signal})
    text = registry.text().decode()
    for line in (
        'kvmesh_variant_wanted_replicas{role="both",variant="h100"} 2',
        'kvmesh_variant_scale_to_replicas{role="both",variant="h100"} 1',
        'kvmesh_pod_capacity_tokens_per_second{role="both",variant="h100",work="prefill"} 9000',
        'kvmesh_pods_cost_per_hour{role="both"} 4',
        'kvmesh_cost_per_million_tokens{role="both",tokens="all"} 0.5',
        'kvmesh_prefill_lean_ratio{role="both"} 0.75',
    ):
        assert line in text
    assert 'work="decode"' not in text.replace('kvmesh_busy_pods{role="both",work="decode"}', "")
    assert 'tokens="output"' not in text

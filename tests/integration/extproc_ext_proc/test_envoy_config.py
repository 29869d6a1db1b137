"""The files of `envoy/`: only fields that Envoy's API has, what the picker relies on, and accepted by a real Envoy."""

import asyncio
import importlib
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.ext_proc.answers import JWT_NAMESPACE
from extproc.policy.targets import TARGETS
from operate.local.envoy_config import named
from operate.local.processes import find_envoy

FOLDER = Path(__file__).parents[3] / "envoy"
FILES = ("local.yaml", "buffered.yaml", "original-dst.yaml")
STEERED_BY_OVERRIDE_HOST = ("local.yaml", "buffered.yaml")
PICK_KEY = "x-gateway-destination-endpoint"
PICKER_BODY_LIMIT_BYTES = 16 << 20
VALIDATE_SECONDS = 30.0


def read(name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return parsed


def type_urls(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if "@type" in value:
            yield value["@type"]
        for item in value.values():
            yield from type_urls(item)
    elif isinstance(value, list):
        for item in value:
            yield from type_urls(item)


@cache
def typed(name: str) -> Any:
    """Parse the file into typed messages, down into every typed_config; an unknown field raises KeyError."""
    raw = read(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generated modules use old pydantic decorators
        for url in ("type.googleapis.com/envoy.config.bootstrap.v3.Bootstrap", *type_urls(raw)):
            # a message can only be unpacked once its module is known
            package, _, _ = url.removeprefix("type.googleapis.com/").rpartition(".")
            importlib.import_module(f"envoy_data_plane.{package}")
        bootstrap = importlib.import_module("envoy_data_plane.envoy.config.bootstrap.v3").Bootstrap
        return bootstrap.from_dict(raw)


def unpacked(extension: Any, type_name: str) -> Any:
    message = extension.typed_config.unpack()
    assert type(message).__name__ == type_name
    return message


def connection_manager(name: str) -> Any:
    [listener] = typed(name).static_resources.listeners
    [network_filter] = listener.filter_chains[0].filters
    return unpacked(network_filter, "HttpConnectionManager")


def ext_proc(name: str) -> Any:
    filters = {part.name: part for part in connection_manager(name).http_filters}
    return unpacked(filters["envoy.filters.http.ext_proc.kvmesh"], "ExternalProcessor")


def route_action(name: str) -> Any:
    [virtual_host] = connection_manager(name).route_config.virtual_hosts
    [route] = virtual_host.routes
    return route.route


def cluster(name: str, cluster_name: str) -> Any:
    [found] = [part for part in typed(name).static_resources.clusters if part.name == cluster_name]
    return found


def addresses(part: Any) -> list[tuple[str, int]]:
    if part.load_assignment is None:
        return []
    found = [
        lb_endpoint.endpoint.address.socket_address
        for locality in part.load_assignment.endpoints
        for lb_endpoint in locality.lb_endpoints
    ]
    return [(address.address, address.port_value) for address in found]


def test_these_are_all_the_files_there_are() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_file()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
async def test_a_real_envoy_accepts_the_file(name: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(str(find_envoy()), "--mode", "validate", "-c", str(FOLDER / name)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(VALIDATE_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            async with asyncio.timeout(VALIDATE_SECONDS):
                await process.wait()

    assert process.returncode == 0, output.decode()
    # Envoy accepts fields that it will drop one day, and says so
    assert "deprecated" not in output.decode().lower()


@pytest.mark.parametrize("name", FILES)
def test_the_file_knows_no_field_that_the_api_does_not_have(name: str) -> None:
    assert typed(name).static_resources.listeners[0].name == "gateway"


@pytest.mark.parametrize("name", FILES)
def test_the_addresses_are_the_documented_ones(name: str) -> None:
    bootstrap = typed(name)
    admin = bootstrap.admin.address.socket_address
    gateway = bootstrap.static_resources.listeners[0].address.socket_address

    assert (admin.address, admin.port_value) == ("127.0.0.1", 9901)
    assert (gateway.address, gateway.port_value) == ("127.0.0.1", 10000)
    assert addresses(cluster(name, "picker")) == [("127.0.0.1", 9002)]
    pods = [] if name == "original-dst.yaml" else [("127.0.0.1", port) for port in range(8101, 8105)]
    assert addresses(cluster(name, "pods")) == pods


@pytest.mark.parametrize("name", FILES)
def test_the_clients_own_pick_is_removed_before_any_filter(name: str) -> None:
    [extension] = connection_manager(name).early_header_mutation_extensions
    mutation = unpacked(extension, "HeaderMutation")

    assert [part.remove for part in mutation.mutations] == [PICK_KEY]


@pytest.mark.parametrize("name", FILES)
def test_the_end_of_the_stream_is_the_end_of_the_exchange_and_answers_do_not_pass_the_picker(name: str) -> None:
    mode = ext_proc(name).processing_mode

    sent = (
        *(mode.request_header_mode, mode.request_trailer_mode),
        *(mode.response_header_mode, mode.response_trailer_mode),
    )

    assert [part.name for part in sent] == ["SEND"] * 4
    assert mode.response_body_mode.name == "NONE"


def test_each_file_has_its_body_mode() -> None:
    assert {name: ext_proc(name).processing_mode.request_body_mode.name for name in FILES} == {
        "local.yaml": "FULL_DUPLEX_STREAMED",
        "buffered.yaml": "BUFFERED",
        "original-dst.yaml": "BUFFERED",
    }


def test_a_buffered_body_may_wait_in_the_picker_s_queue_for_as_long_as_any_class_may() -> None:
    assert [ext_proc(name).message_timeout for name in FILES] == [timedelta(seconds=s) for s in (10, 360, 360)]
    assert max(targets.queue_seconds for targets in TARGETS.values()) < 360


@pytest.mark.parametrize("name", FILES)
def test_a_picker_whose_machine_is_gone_is_noticed_while_requests_wait_there(name: str) -> None:
    key = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    picker = cluster(name, "picker").typed_extension_protocol_options[key].unpack()
    keepalive = picker.explicit_http_config.http2_protocol_options.connection_keepalive
    assert (keepalive.interval, keepalive.timeout) == (timedelta(seconds=30), timedelta(seconds=20))


@pytest.mark.parametrize("name", FILES)
def test_the_pickers_metadata_is_received_and_a_lost_picker_is_answered_503(name: str) -> None:
    processor = ext_proc(name)

    assert processor.metadata_options.receiving_namespaces.untyped[0] == "envoy.lb"
    assert processor.failure_mode_allow is (name != "local.yaml")  # then another filter refuses
    assert processor.status_on_error.code == 503
    assert processor.grpc_service.envoy_grpc.cluster_name == "picker"
    assert processor.grpc_service.timeout is None


@pytest.mark.parametrize("name", FILES)
def test_a_long_generation_meets_no_timeout(name: str) -> None:
    assert connection_manager(name).stream_idle_timeout == timedelta(0)
    assert route_action(name).timeout == timedelta(0)


@pytest.mark.parametrize("name", FILES)
def test_bodies_over_the_pickers_limit_still_reach_the_picker(name: str) -> None:
    [listener] = typed(name).static_resources.listeners
    kept = [route["request_body_buffer_limit"] for route in routes(read(name)) if "request_body_buffer_limit" in route]

    assert cluster(name, "pods").per_connection_buffer_limit_bytes >= 2 * PICKER_BODY_LIMIT_BYTES
    if name == "local.yaml":  # what duplex bodies take beyond the listener's limit goes back to the system
        assert listener.per_connection_buffer_limit_bytes == 1 << 20
        assert min(kept) >= 2 * PICKER_BODY_LIMIT_BYTES
    else:
        assert listener.per_connection_buffer_limit_bytes >= 2 * PICKER_BODY_LIMIT_BYTES
        assert kept == []


def routes(config: dict[str, Any]) -> list[dict[str, Any]]:
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    [host] = manager["route_config"]["virtual_hosts"]
    found: list[dict[str, Any]] = host["routes"]
    return found


@pytest.mark.parametrize("name", FILES)
def test_circuit_breakers_do_not_take_part_in_the_decision(name: str) -> None:
    for cluster_name in ("picker", "pods"):
        [threshold] = cluster(name, cluster_name).circuit_breakers.thresholds
        limits = (
            threshold.max_connections,
            threshold.max_pending_requests,
            threshold.max_requests,
            threshold.max_retries,
        )
        assert limits == (1_000_000,) * 4


@pytest.mark.parametrize("name", FILES)
def test_the_picker_is_spoken_to_in_http2_and_pods_connections_end_before_vllm_closes_them(name: str) -> None:
    key = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    picker = cluster(name, "picker").typed_extension_protocol_options[key].unpack()
    pods = cluster(name, "pods").typed_extension_protocol_options[key].unpack()

    assert picker.explicit_http_config.http2_protocol_options is not None
    assert pods.common_http_protocol_options.idle_timeout == timedelta(seconds=4)


@pytest.mark.parametrize("name", FILES)
def test_the_client_is_told_which_pod_answered(name: str) -> None:
    [option] = connection_manager(name).route_config.response_headers_to_add

    assert (option.header.key, option.header.value) == ("x-kvmesh-upstream", "%UPSTREAM_REMOTE_ADDRESS%")
    assert option.append_action.name == "OVERWRITE_IF_EXISTS_OR_ADD"


@pytest.mark.parametrize("name", STEERED_BY_OVERRIDE_HOST)
def test_the_pick_comes_from_metadata_alone_with_a_fallback_for_what_it_does_not_name(name: str) -> None:
    [policy] = cluster(name, "pods").load_balancing_policy.policies
    override = unpacked(policy.typed_extension_config, "OverrideHost")

    [source] = override.override_host_sources
    assert source.header == ""
    assert (source.metadata.key, [segment.key for segment in source.metadata.path]) == ("envoy.lb", [PICK_KEY])
    [fallback] = override.fallback_policy.policies
    assert fallback.typed_extension_config.name == "envoy.load_balancing_policies.least_request"


@pytest.mark.parametrize("name", STEERED_BY_OVERRIDE_HOST)
def test_retries_walk_the_pickers_list_only_for_what_no_pod_has_begun(name: str) -> None:
    retry = route_action(name).retry_policy

    assert retry.retry_on == "connect-failure,refused-stream,reset-before-request"
    assert retry.num_retries == 2
    assert retry.retry_host_predicate == []  # override_host walks the list by itself


def test_original_dst_takes_its_one_address_from_metadata_and_never_from_a_header() -> None:
    pods = cluster("original-dst.yaml", "pods")

    assert pods.type.name == "ORIGINAL_DST"
    assert pods.lb_policy.name == "CLUSTER_PROVIDED"
    assert pods.original_dst_lb_config.use_http_header is False
    key = pods.original_dst_lb_config.metadata_key
    assert (key.key, [segment.key for segment in key.path]) == ("envoy.lb", [PICK_KEY])
    assert route_action("original-dst.yaml").retry_policy is None


def test_the_buffered_file_differs_from_the_local_one_in_how_bodies_reach_the_picker_alone() -> None:
    local, buffered = read("local.yaml"), read("buffered.yaml")
    for config in (local, buffered):
        config["static_resources"]["listeners"][0].pop("per_connection_buffer_limit_bytes")  # a BUFFERED body must fit
        for route in routes(config):
            route.pop("request_body_buffer_limit", None)
        manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        names = ("envoy.filters.http.ext_proc.kvmesh", "envoy.filters.http.router")
        manager["http_filters"] = [named(manager["http_filters"], each) for each in names]
        processor = manager["http_filters"][0]["typed_config"]
        processor["processing_mode"].pop("request_body_mode")
        processor.pop("failure_mode_allow")  # only beside buffered bodies may it be true
        processor.pop("message_timeout", None)
        processor.pop("allow_mode_override", None)
        for namespaces in processor["metadata_options"].values():
            namespaces["untyped"] = [name for name in namespaces["untyped"] if name != "kvmesh"]

    assert buffered == local


@pytest.mark.parametrize("name", FILES)
def test_the_picker_is_told_who_answered(name: str) -> None:
    assert ext_proc(name).response_attributes == ["upstream.address", "response.code_details"]


@pytest.mark.parametrize("name", FILES)
def test_the_picker_is_told_the_routes_candidates_and_the_verified_claims(name: str) -> None:
    picking = [
        part for part in connection_manager(name).http_filters if part.name == "envoy.filters.http.ext_proc.kvmesh"
    ]
    [processor] = [unpacked(part, "ExternalProcessor") for part in picking]
    forwarded = processor.metadata_options.forwarding_namespaces.untyped
    assert {"envoy.lb.subset_hint", JWT_NAMESPACE} <= set(forwarded)


@pytest.mark.parametrize("name", ["buffered.yaml", "original-dst.yaml"])
def test_buffered_files_let_the_picker_ask_for_a_response(name: str) -> None:
    assert ext_proc(name).allow_mode_override is True


@pytest.mark.parametrize("name", ["buffered.yaml", "original-dst.yaml"])
def test_buffered_files_go_on_with_an_answer_whose_picker_is_gone_and_refuse_requests_without_a_pick(name: str) -> None:
    picking, refusing, router = connection_manager(name).http_filters
    assert (picking.name, router.name) == ("envoy.filters.http.ext_proc.kvmesh", "envoy.filters.http.router")
    assert ext_proc(name).failure_mode_allow is True
    fault = unpacked(refusing, "HttpFault")
    assert (fault.abort.http_status, fault.abort.percentage.numerator) == (503, 100)
    [header] = fault.headers
    assert (header.name, header.present_match, header.invert_match) == (PICK_KEY, True, True)


def test_the_duplex_file_has_a_filter_of_its_own_for_responses_with_a_note_that_fails_open() -> None:
    # first in the list is last on the way back: whoever came behind it would hold back headers that it has let go
    filters = connection_manager("local.yaml").http_filters
    assert [each.name for each in filters] == [
        "kvmesh.strip-client-headers",
        "envoy.filters.http.ext_proc.kvmesh-response",
        "kvmesh.note",
        "envoy.filters.http.ext_proc.kvmesh",
        "envoy.filters.http.router",
    ]
    matching = unpacked(filters[1], "ExtensionWithMatcher")
    processor = unpacked(matching.extension_config, "ExternalProcessor")
    modes = processor.processing_mode
    [matcher] = matching.xds_matcher.matcher_list.matchers
    status, without_note = matcher.predicate.and_matcher.predicate
    note = without_note.not_matcher.single_predicate

    # there is no status before the response, so that nothing is judged before the pick has left its note
    assert status.single_predicate.input.typed_config.unpack().header_name == ":status"
    assert note.input.typed_config.unpack().header_name == "x-kvmesh-note"
    assert type(matcher.on_match.action.typed_config.unpack()).__name__ == "SkipFilter"
    assert (modes.request_header_mode.name, modes.request_body_mode.name) == ("SKIP", "NONE")
    assert (modes.response_header_mode.name, modes.response_body_mode.name) == ("SEND", "NONE")
    assert (processor.allow_mode_override, processor.failure_mode_allow) == (True, True)
    namespaces = processor.metadata_options
    assert namespaces.forwarding_namespaces.untyped == namespaces.receiving_namespaces.untyped == ["kvmesh"]

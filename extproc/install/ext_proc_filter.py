"""The HTTP filters that ask the picker, as in envoy/local.yaml and envoy/original-dst.yaml, for one release. Pure.

A test compares them with those files field by field: what the picker needs is written there, with the reasons.
"""

from typing import Any

from extproc.install.istio_release import Wiring
from extproc.install.plan import CLUSTER_DOMAIN, PICKER, BodyMode, FailureMode, InstallPlan
from extproc.policy.values import Steering

PICK_FILTER = "envoy.filters.http.ext_proc.kvmesh"  # not Istio's own name: routes refer to filters by name
RESPONSE_FILTER = "envoy.filters.http.ext_proc.kvmesh-response"
STRIP_FILTER = "kvmesh.strip-client-headers"
GRPC_PORT = 9002
# what only the picker and Envoy may say
CLIENT_MAY_NOT_SEND = (
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
)
TYPES = "type.googleapis.com/envoy"
EXT_PROC = f"{TYPES}.extensions.filters.http.ext_proc.v3"
HEADER_MUTATION = f"{TYPES}.extensions.filters.http.header_mutation.v3.HeaderMutation"
RESPONSE_TIMEOUT = "10s"  # per message; at the default of 200 ms a picker held up for a moment would cost a good answer


def picker_host(plan: InstallPlan) -> str:
    """Return the picker's name in DNS."""
    return f"{PICKER}.{plan.namespace}.svc.{CLUSTER_DOMAIN}"


def strip_filter() -> dict[str, Any]:
    """Return the filter that drops what a client says about endpoints: only the picker steers."""
    mutations = [{"remove": name} for name in CLIENT_MAY_NOT_SEND]
    return {
        "name": STRIP_FILTER,
        "typed_config": {"@type": HEADER_MUTATION, "mutations": {"request_mutations": mutations}},
    }


def pick_filter(plan: InstallPlan, wiring: Wiring) -> dict[str, Any]:
    """Return the filter that asks for an endpoint; it is off but for the routes that switch it on."""
    buffered = wiring.body_mode is BodyMode.BUFFERED
    config: dict[str, Any] = {
        "@type": f"{EXT_PROC}.ExternalProcessor",
        "stat_prefix": "kvmesh",
        "grpc_service": _picker_service(plan),
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED" if buffered else "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SEND",
        },
        # enforced for buffered bodies: above the longest wait in the picker's queue
        "message_timeout": f"{plan.longest_queue_seconds + 60}s" if buffered else RESPONSE_TIMEOUT,
        "failure_mode_allow": plan.failure_mode is FailureMode.FAIL_OPEN and not wiring.route_failure_mode,
        # which pool a weighted route has drawn: the route's own word for the pool cannot tell
        "request_attributes": ["xds.cluster_name"],
        "response_attributes": ["upstream.address", "response.code_details"],
        "metadata_options": {
            "receiving_namespaces": {"untyped": ["envoy.lb"] if buffered else ["envoy.lb", "kvmesh"]},
            "forwarding_namespaces": {"untyped": _forwarded(wiring)},
        },
    }
    if buffered:
        config["allow_mode_override"] = True  # how the picker asks for a response's body; duplex forbids it
    if wiring.status_on_error:
        config["status_on_error"] = {"code": "ServiceUnavailable"}
    return {"name": PICK_FILTER, "disabled": True, "typed_config": config}


def response_filter(plan: InstallPlan) -> dict[str, Any]:
    """Return the filter that reads the responses for which the pick left a note; skipped by all others."""
    return {
        "name": RESPONSE_FILTER,
        "typed_config": {
            "@type": f"{TYPES}.extensions.common.matching.v3.ExtensionWithMatcher",
            "xds_matcher": _skip_without_note(),
            "extension_config": {
                "name": "envoy.filters.http.ext_proc",
                "typed_config": {
                    "@type": f"{EXT_PROC}.ExternalProcessor",
                    "stat_prefix": "kvmesh_response",
                    "grpc_service": _picker_service(plan),
                    "processing_mode": {
                        "request_header_mode": "SKIP",
                        "request_body_mode": "NONE",
                        "request_trailer_mode": "SKIP",
                        "response_header_mode": "SEND",
                        "response_body_mode": "NONE",
                        "response_trailer_mode": "SEND",
                    },
                    "allow_mode_override": True,
                    "message_timeout": RESPONSE_TIMEOUT,
                    "failure_mode_allow": True,  # the answer is there and paid for
                    "response_attributes": ["upstream.address"],
                    "metadata_options": {
                        "receiving_namespaces": {"untyped": ["kvmesh"]},
                        "forwarding_namespaces": {"untyped": ["kvmesh"]},
                    },
                },
            },
        },
    }


def _picker_service(plan: InstallPlan) -> dict[str, Any]:
    """Name Istio's own cluster of the picker: mTLS, no limit of 1024 requests. A timeout would cut answers."""
    host = picker_host(plan)
    return {"envoy_grpc": {"cluster_name": f"outbound|{GRPC_PORT}||{host}", "authority": host}}


def _forwarded(wiring: Wiring) -> list[str]:
    served = ["envoy.lb"] if wiring.steering is Steering.OVERRIDE_HOST else []
    return [*served, "envoy.lb.subset_hint", "envoy.filters.http.jwt_authn"]


def _skip_without_note() -> dict[str, Any]:
    responding = {
        "single_predicate": {
            "input": {
                "name": "status",
                "typed_config": {
                    "@type": f"{TYPES}.type.matcher.v3.HttpResponseHeaderMatchInput",
                    "header_name": ":status",
                },
            },
            "value_match": {"safe_regex": {"google_re2": {}, "regex": ".+"}},
        }
    }
    noted = {
        "single_predicate": {
            "input": {
                "name": "note",
                "typed_config": {
                    "@type": f"{TYPES}.extensions.matching.common_inputs.network.v3.DynamicMetadataInput",
                    "filter": "kvmesh",
                    "path": [{"key": "response"}],
                },
            },
            "custom_match": {
                "name": "present",
                "typed_config": {
                    "@type": f"{TYPES}.extensions.matching.input_matchers.metadata.v3.Metadata",
                    "value": {"present_match": True},
                },
            },
        }
    }
    skip = {
        "name": "skip",
        "typed_config": {"@type": f"{TYPES}.extensions.filters.common.matcher.action.v3.SkipFilter"},
    }
    predicate = {"and_matcher": {"predicate": [responding, {"not_matcher": noted}]}}
    return {"matcher_list": {"matchers": [{"predicate": predicate, "on_match": {"action": skip}}]}}

"""The picker's settings: filled by the command line, checked once at start-up, never changed later."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from extproc.errors import ConfigError
from extproc.ext_proc.exchange import HELD_BODY_BYTES
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pods.endpoint import Role
from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy
from extproc.policy.reading import PolicyDocumentError
from extproc.policy.values import PickPolicy, Steering
from extproc.settings.observation_settings import ObservationSettings
from extproc.settings.yaml_text import read_yaml
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.pods.pod_access import PodAccess
from kvmesh.redis.address import RedisAccess
from kvmesh.settings import declared, group, milliseconds, setting, text_setting

POLICY = "--policy"
INLINE = re.compile(r"^\s*[{\[]|:\s")  # YAML or JSON, not a path


class GrpcServer(StrEnum):
    """What serves the gRPC port."""

    OWN = "own"
    GRPCIO = "grpcio"


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Split `IP:PORT,IP:PORT`; IPv6 is bracketed. Raise ConfigError naming the bad entry.

    Host names are refused: Envoy's `override_host` compares the pick with its cluster's addresses as text.
    """
    entries = tuple(entry.strip() for entry in text.split(",") if entry.strip())
    for entry in entries:
        host, _, port = entry.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        try:
            version = ip_address(host.strip("[]")).version
        except ValueError:
            raise ConfigError(f"endpoint {entry!r} does not start with an IP address (IPv6 as [::1]:8000)") from None
        if not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536 or bracketed != (version == 6):
            raise ConfigError(f"endpoint {entry!r} is not IP:PORT (IPv6 as [::1]:8000)")
    if len(set(entries)) != len(entries):
        raise ConfigError(f"an endpoint is listed twice in {text!r}")
    return entries


def parse_names(text: str | None) -> frozenset[str]:
    """Split `name,name`; None and the empty text yield no names."""
    return frozenset(name.strip() for name in (text or "").split(",") if name.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerSettings:
    """The settings of `kvmesh extproc`, except `PolicyFlags`."""

    endpoints: tuple[str, ...] = text_setting(
        (),
        "vLLM pods as IP:PORT,IP:PORT,… (IPv6: [::1]:8000). Required without --kubernetes or --policies.",
        read=parse_endpoints,
    )
    kubernetes: bool = setting(
        False, "Follow the cluster's pods, pools and policies (KUBECONFIG, or the pod's own account)."
    )
    policies_folder: Path | None = setting(
        None,
        "Follow a folder of YAML and JSON documents instead: Pods, Services, InferencePools, "
        "InferencePolicies (docs/guides/pools.md).",
        "policies",
        metavar="FOLDER",
    )
    root_namespace: str = setting("istio-system", "Namespace whose policies without targetRefs are mesh-wide.")
    namespaces: frozenset[str] = text_setting(
        frozenset(), "Namespaces to follow with --kubernetes, separated by commas. Default: all.", read=parse_names
    )
    model: str | None = setting(None, "Served model name of --tokenizer.")
    tokenizer_folder: Path | None = setting(
        None, "Folder with the model's tokenizer.json and chat template. Default: the pods tokenize.", "tokenizer"
    )
    tokenizer_folders: Path | None = setting(
        None,
        "Folder of tokenizer folders named like their models, for models without a configured tokenizer (with "
        "--kubernetes or --policies); new folders are found at run time.",
        "tokenizers",
        metavar="FOLDER",
        must_exist=True,
        is_folder=True,
    )
    host: str = setting("127.0.0.1", "Listen address for Envoy and the admin pages.")
    grpc_port: int = setting(9002, "Port for Envoy: ext_proc and gRPC health.", least=0, most=65535)
    admin_port: int = setting(9090, "Port for health, metrics, state, explain.", least=0, most=65535)
    hash_seed: str = setting("kvmesh", "Seed of the block keys; equal for indexer and picker.")
    index_timeout_seconds: float = milliseconds(
        0.02,
        "Timeout of Redis, in milliseconds; after it the picker picks without index and shared state.",
        "index_timeout_ms",
        least=0.1,
    )
    scrape_interval_seconds: float = milliseconds(
        0.2,
        "Interval between scrapes of a pod's metrics, in milliseconds (±20 % jitter).",
        "scrape_interval_ms",
        least=10,
    )
    scrape_timeout_seconds: float = 1.0
    max_body_bytes: int = setting(16 << 20, "Maximum bytes of a request body, of an upload twice; else 413.", least=1)
    max_held_body_bytes: int = setting(
        HELD_BODY_BYTES,
        "Memory limit in bytes of all unfinished bodies, beyond which the largest gets 503; and of all waiting "
        "requests, beyond which the largest of the lowest priority gets 503.",
        least=1 << 20,
    )
    steering: Steering = setting(
        Steering.OVERRIDE_HOST, "override-host: a list of addresses, for Envoy's retries; original-dst: one address."
    )
    drain_seconds: float = setting(5, "Seconds of service, as not ready, after the signal to stop.", least=0)
    respawn: bool = setting(
        False,
        "Restart a picker that dies, from a process with its modules loaded; more than five deaths a minute "
        "end that process, too.",
    )
    otlp_endpoint: str | None = setting(
        None, "OTLP/HTTP address for traces (JSON), like http://127.0.0.1:4318/v1/traces. Default: no traces."
    )
    decision_headers: bool = setting(
        True,
        "Send x-kvmesh-decision-id and x-kvmesh-predicted-cached-tokens to clients "
        "(docs/reference/requests.md#what-an-answer-tells).",
        switch="--decision-headers/--no-decision-headers",
    )
    grpc_tls: str | None = setting(
        None,
        "PEM file with the certificate of the gRPC port; after a comma its key's, if separate. Reloaded on change. "
        "self-signed: for callers that check none. Default: clear text.",
        metavar="CERT[,KEY]|self-signed",
    )
    grpc_server: GrpcServer = setting(
        GrpcServer.OWN,
        "Server of the gRPC port: kvmesh's own HTTP/2, or gRPC's (grpcio), at two to five times the CPU "
        "(docs/decisions/0002-grpc-transport.md).",
    )
    observation: ObservationSettings = group(ObservationSettings())
    shares_load: bool = True  # bookings, with other replicas through Redis
    sample_share: float = setting(
        0.02,
        "Share of responses to read for actual cached tokens and latencies.",
        least=0,
        most=1,
    )
    render_timeout_seconds: float = milliseconds(
        0.5,
        "Timeout of a pod's render endpoint, in milliseconds; four times as long with media.",
        "render_timeout_ms",
        least=1,
    )
    pod_access: PodAccess = group(PodAccess())
    admin_access: AdminAccess = group(AdminAccess())
    redis_url: str = declared(RedisAccess, "url")
    policy: PickPolicy = field(default_factory=PickPolicy)
    models: ModelTable = field(default_factory=ModelTable)
    policy_fields: Mapping[str, Any] = field(default_factory=dict)  # policy and models as an InferencePolicy's fields

    @property
    def follows_mesh(self) -> bool:
        """Whether pools and policies come from documents that may change at any time."""
        return self.kubernetes or self.policies_folder is not None

    @property
    def model_table(self) -> ModelTable:
        """The models, including the one of `--model`."""
        if self.model is None or self.models.served_as(self.model) is not None:
            return self.models
        one = ServedModel(
            name=self.model,
            tokens_from=TokensFrom.AUTO if self.tokenizer_folder is None else TokensFrom.TOKENIZER,
            tokenizer_folder=self.tokenizer_folder,
        )
        return replace(self.models, served=(one, *self.models.served))

    def __post_init__(self) -> None:
        if self.tokenizer_folder is not None and self.model is None:
            raise ConfigError("--tokenizer is given without --model: name the model whose tokenizer it is")
        if self.kubernetes and self.policies_folder is not None:
            raise ConfigError("--kubernetes and --policies: documents come from the one or the other")
        if self.endpoints and self.follows_mesh:
            raise ConfigError("--endpoints never change: leave them out with --kubernetes or --policies")
        if self.follows_mesh:
            return  # flags for endpoints and models are defaults below the policies, and checked with them
        for name, addresses in (("cordoned", self.policy.cordoned), ("roles", self.policy.roles)):
            if strangers := sorted(set(addresses).difference(self.endpoints)):
                raise ConfigError(f"--{name}: {strangers[0]!r} is none of --endpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFlags:
    """The flags for policy, cordons and roles, as given."""

    policy: str | None = setting(
        None,
        "The policy of all pools (docs/reference/policy.md): an InferencePolicy or its `spec` alone, as a YAML or JSON "
        "file, or inline, as 'scoring: {strategy: least-request}'. Default: strategy kv-aware.",
        metavar="FILE|YAML",
    )
    cordoned: str | None = setting(None, "Endpoints that get no new requests.", metavar="IP:PORT,…")
    roles: str | None = setting(
        None,
        "Roles of endpoints: both (default), prefill (no client requests) or decode.",
        metavar="IP:PORT=ROLE,…",
    )

    def added_to(self, settings: PickerSettings) -> PickerSettings:
        """Return the settings with policy and models. Raise ConfigError naming the invalid flag."""
        fields = read_policy(self.policy)
        policy, models = pick_policy(fields)
        return replace(
            settings,
            policy=replace(policy, cordoned=parse_names(self.cordoned), roles=parse_roles(self.roles or "")),
            models=models,
            policy_fields=fields,
        )


def parse_roles(text: str) -> dict[str, Role]:
    """Read `endpoint=role,…`. Raise ConfigError for an unknown role."""
    roles: dict[str, Role] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        endpoint, _, role = entry.rpartition("=")
        if not endpoint or role not in list(Role):
            raise ConfigError(f"--roles: {entry!r} is not IP:PORT=ROLE; roles are {', '.join(Role)}")
        roles[endpoint] = Role(role)
    return roles


def read_policy(text: str | None) -> dict[str, Any]:
    """Read `--policy` as fields of an InferencePolicy. Raise ConfigError."""
    if not text:
        return {}
    try:
        return read_policy_file(_document(text))
    except PolicyDocumentError as error:
        raise ConfigError(f"{POLICY}: {error}") from error


def read_models(text: str | None) -> ModelTable:
    """Read the models of `--policy`. Raise ConfigError."""
    return pick_policy(read_policy(text))[1]


def _document(text: str) -> object:
    """Read a file's path, inline YAML, or `name=value,…` (the form of a flat mapping in the --config file)."""
    if INLINE.search(text):
        return read_yaml(text, where=POLICY)
    path = Path(text)
    if "=" not in text or _is_file(path):
        try:
            return read_yaml(path.read_text(encoding="utf-8"), where=f"{POLICY} {text}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{POLICY}: cannot read {text}: {error}") from error
    return {
        name.strip(): read_yaml(value, where=POLICY)
        for name, _, value in (part.partition("=") for part in text.split(","))
    }


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a long `name=value,…` is not a valid file name
        return False

"""The picker's settings, checked once at start-up; the command line fills them, nothing changes them later."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from extproc.errors import ConfigError
from extproc.ext_proc.grpc_tls_settings import GrpcTlsSettings
from extproc.ext_proc.uploads import UNFINISHED_BODY_BYTES
from extproc.external_metrics.settings import ExternalMetricsSettings
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pods.endpoint import Role
from extproc.policy.inference_policy import RESETS, read_policy_file, read_section, read_spec
from extproc.policy.merge import lay_over
from extproc.policy.merged_policy import pick_policy
from extproc.policy.reading import PolicyDocumentError
from extproc.policy.values import SCORER_NAMES, PickPolicy, Steering, Strategy
from extproc.settings.observation_settings import ObservationSettings
from extproc.settings.yaml_text import read_yaml
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.pods.pod_access import PodAccess
from kvmesh.redis.address import RedisAccess
from kvmesh.settings import group, milliseconds, setting, text_setting


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Split `IP:PORT,IP:PORT`; IPv6 is bracketed. Raise ConfigError naming the bad entry.

    Names are refused: Envoy's `override_host` compares the pick with the addresses of its cluster as text.
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
    """Split `name,name`; None and the empty text are no names."""
    return frozenset(name.strip() for name in (text or "").split(",") if name.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerSettings:
    """The settings of `kvmesh extproc`, but for what operators declare of pools and models."""

    endpoints: tuple[str, ...] = text_setting(
        (),
        "vLLM pods as IP:PORT,IP:PORT,… (IPv6 as [::1]:8000). Needed without --kubernetes and --policies.",
        read=parse_endpoints,
    )
    kubernetes: bool = setting(
        False, "Follow the pods, pools and policies of the cluster (KUBECONFIG, or the pod's own account)."
    )
    policies_folder: Path | None = setting(
        None,
        "Follow the same documents in a folder of YAML and JSON files instead: Pods, Services, InferencePools, "
        "InferencePolicies (docs/guides/pools.md).",
        "policies",
        metavar="FOLDER",
    )
    root_namespace: str = setting("istio-system", "Namespace whose policies without targets are for the whole mesh.")
    namespaces: frozenset[str] = text_setting(
        frozenset(), "Comma-separated namespaces to follow, with --kubernetes. Default: all.", read=parse_names
    )
    model: str | None = setting(None, "Served model name that --tokenizer belongs to.")
    tokenizer_folder: Path | None = setting(
        None, "Folder with the model's tokenizer.json and chat template. Without: the pods are asked.", "tokenizer"
    )
    tokenizer_folders: Path | None = setting(
        None,
        "With --kubernetes or --policies: folder with a tokenizer folder for each model, by its name, for models "
        "whose tokens nobody has said anything about. A folder that appears later is seen by itself.",
        "tokenizers",
        metavar="FOLDER",
        must_exist=True,
        is_folder=True,
    )
    host: str = setting("127.0.0.1", "Address to listen on, for Envoy and for the admin pages.")
    grpc_port: int = setting(9002, "Port for Envoy: ext_proc and gRPC health.", least=0, most=65535)
    admin_port: int = setting(9090, "Port for health, metrics, state, explain.", least=0, most=65535)
    known_models: frozenset[str] = text_setting(
        frozenset(), "Comma-separated model names; any other is answered 404. Default: accept all.", read=parse_names
    )
    hash_seed: str = setting("kvmesh", "Seed of the block keys; the same for indexer and picker.")
    index_timeout_seconds: float = milliseconds(
        0.02,
        "Milliseconds to wait for Redis before picking without the index, and without what other pickers share.",
        "index_timeout_ms",
        least=0.1,
    )
    scrape_interval_seconds: float = milliseconds(
        0.2, "Milliseconds between two scrapes of a pod's metrics (±20 % jitter).", "scrape_interval_ms", least=10
    )
    scrape_timeout_seconds: float = milliseconds(
        1.0, "Milliseconds until a scrape is given up.", "scrape_timeout_ms", least=10
    )
    max_body_bytes: int = setting(16 << 20, "Bytes of the largest request body; more is answered 413.", least=1)
    max_unfinished_body_bytes: int = setting(
        UNFINISHED_BODY_BYTES,
        "Bytes that all request bodies may hold that have not ended; beyond, the largest is answered 503.",
        least=1 << 20,
    )
    max_waiting_body_bytes: int = setting(
        256 << 20,
        "Bytes that requests may hold that wait for the first pod of a pool; beyond, the least important are answered "
        "503.",
        least=1 << 20,
    )
    steering: Steering = setting(
        Steering.OVERRIDE_HOST, "override-host: a list that retries walk; original-dst: exactly one address."
    )
    sheddable_429: bool = setting(
        False,
        "Refuse requests of sheddable classes with 429, as the endpoint picker protocol says, where their policy gives "
        "no refusalStatus. Default: 503.",
    )
    drain_seconds: float = setting(5, "Seconds to go on serving, as not ready, after the signal to stop.", least=0)
    respawn: bool = setting(
        False,
        "Start the picker again at once when it dies, from a process that has loaded its modules. More than five "
        "deaths in a minute end that one, too.",
    )
    otlp_endpoint: str | None = setting(
        None, "OTLP/HTTP address for traces (JSON), like http://127.0.0.1:4318/v1/traces. Default: no traces."
    )
    extension_metrics: bool = setting(
        False,
        "Show metrics under the names of the Gateway API inference extension, too: inference_pool_*, "
        "inference_objective_* and inference_extension_* (docs/reference/metrics.md).",
        "inference_extension_metrics",
    )
    decision_headers: bool = setting(
        True,
        "Tell clients in x-kvmesh-decision-id and x-kvmesh-predicted-cached-tokens how their request was decided "
        "(docs/reference/requests.md#what-an-answer-tells).",
        switch="--decision-headers/--no-decision-headers",
    )
    grpc_tls: GrpcTlsSettings = group(GrpcTlsSettings())
    external_metrics: ExternalMetricsSettings = group(ExternalMetricsSettings())
    observation: ObservationSettings = group(ObservationSettings())
    shares_load: bool = setting(
        True, "Tell other replicas through Redis what is booked, and hear it from them.", "share_load"
    )
    sample_share: float = setting(
        0.02,
        "Share of the responses that are read: cached tokens beside the prediction, times beside the targets.",
        least=0,
        most=1,
    )
    token_budget: int = setting(
        500000, "Tokens of one request that are tokenized; what is beyond is not looked up.", least=1
    )
    render_timeout_seconds: float = milliseconds(
        0.5,
        "Milliseconds to wait for a pod's tokens where it renders prompts; with media four times as long.",
        "render_timeout_ms",
        least=1,
    )
    read_below_bytes: int = setting(
        16384, "Largest response without streaming, in bytes, whose usage is read, too. 0: none.", least=0
    )
    reads_per_second: float = setting(
        5, "Most of these responses that are read in a second; samples come on top.", least=0
    )  # reading one costs as much as a fifth of a pick
    pod_access: PodAccess = group(PodAccess())
    admin_access: AdminAccess = group(AdminAccess())
    redis_url: RedisAccess | str = group(RedisAccess())  # a plain address has no files beside it
    policy: PickPolicy = field(default_factory=PickPolicy)
    models: ModelTable = field(default_factory=ModelTable)
    policy_fields: Mapping[str, Any] = field(default_factory=dict)  # policy and models as an InferencePolicy's fields

    @property
    def follows_mesh(self) -> bool:
        """Whether pools and policies come from documents that may change at any time."""
        return self.kubernetes or self.policies_folder is not None

    @property
    def sheddable_status(self) -> int:
        """HTTP status of refusals of sheddable classes that name none."""
        return HTTPStatus.TOO_MANY_REQUESTS if self.sheddable_429 else HTTPStatus.SERVICE_UNAVAILABLE

    @property
    def model_table(self) -> ModelTable:
        """Return the models with the one of `--model`, unless they name it already."""
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
        if self.external_metrics.port is not None and not self.kubernetes:
            raise ConfigError("--external-metrics-port without --kubernetes: the cluster says who may ask there")
        if self.external_metrics.port in {self.grpc_port, self.admin_port}:
            raise ConfigError("--external-metrics-port is that of another server of the picker: give it one of its own")
        if self.endpoints and self.follows_mesh:
            raise ConfigError("--endpoints never change: leave them out with --kubernetes or --policies")
        if self.follows_mesh:
            return  # what the flags say of endpoints and models is below the policies, and checked with them
        for name, addresses in (("cordoned", self.policy.cordoned), ("roles", self.policy.roles)):
            if strangers := sorted(set(addresses).difference(self.endpoints)):
                raise ConfigError(f"--{name}: {strangers[0]!r} is none of --endpoints")
        if self.models.only_listed:
            self._require_smaller_models_are_listed()

    def _require_smaller_models_are_listed(self) -> None:
        listed = self.model_table.names()
        for name, priority_class in self.policy.priorities.classes.items():
            for i, step in enumerate(priority_class.degrade):
                if step.model and step.model not in listed:
                    raise ConfigError(
                        f"spec.priorities.classes[{name}].degrade[{i}].model: {step.model!r} is not in --models "
                        "and would be answered 404 (onlyListed)"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFlags:
    """What flags declare of the policy and of the models, as given."""

    policy: str | None = setting(
        None,
        "The policy of all pools (docs/reference/policy.md): an InferencePolicy or its `spec` alone, as a YAML or JSON "
        "file, or the mapping itself. Default: strategy kv-aware.",
        metavar="FILE|JSON",
    )
    strategy: Strategy | None = setting(
        None, "Preset of the weights. Takes precedence over --policy. Default: kv-aware."
    )
    weights: str | None = setting(
        None,
        "Scorers and their weights, as prefix=3,queue-depth=2; those left out count 0. Takes precedence over "
        "--policy and --strategy.",
    )
    stale_after_ms: float | None = setting(
        None, "Milliseconds after which a pod's last report counts as unknown load. Default: 2000.", least=10
    )
    models: str | None = setting(
        None,
        "The policy's section `models` by itself (docs/guides/models.md): a YAML or JSON file, or the mapping. Takes "
        "precedence over --policy.",
        metavar="FILE|JSON",
    )
    priorities: str | None = setting(
        None,
        "The policy's section `priorities` by itself (docs/guides/priorities.md): classes, rules, tenants. "
        "Takes precedence over --policy. Default: classes critical, standard (for all requests) and sheddable.",
        metavar="FILE|JSON",
    )
    overload: bool | None = setting(
        None,
        "Hold requests back while the pods are full, and refuse those that may be refused. Default: on.",
        switch="--overload/--no-overload",
    )
    trust_objective: bool | None = setting(
        None,
        "Let x-gateway-inference-objective raise a request's class; it may always lower it. Default: off.",
        switch="--trust-objective/--no-trust-objective",
    )

    cordoned: str | None = setting(None, "Endpoints that get no new requests.", metavar="IP:PORT,…")
    roles: str | None = setting(
        None,
        "Roles of endpoints: both (the default), prefill or decode; prefill takes no client's request.",
        metavar="IP:PORT=ROLE,…",
    )

    def added_to(self, settings: PickerSettings) -> PickerSettings:
        """Return the settings with policy and models. Raise ConfigError naming what cannot be read."""
        flags = {
            "strategy": self.strategy,
            "weights": None if self.weights is None else parse_weights(self.weights),
            "stale_after_seconds": None if self.stale_after_ms is None else self.stale_after_ms / 1000,
        }
        policy = read_policy(
            self.policy,
            flags,
            priorities=self.priorities,
            overload=self.overload,
            trust_objective=self.trust_objective,
        )
        policy_fields = read_policy_fields(
            self.policy,
            flags,
            priorities=self.priorities,
            overload=self.overload,
            trust_objective=self.trust_objective,
            models=self.models,
        )
        return replace(
            settings,
            policy=replace(policy, cordoned=parse_names(self.cordoned), roles=parse_roles(self.roles or "")),
            models=read_models(self.models, policy=self.policy),
            policy_fields=policy_fields,
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


def parse_weights(text: str) -> dict[str, float]:
    """Read `scorer=weight,…`; scorers left out get weight 0. Raise ConfigError for an unknown scorer."""
    weights: dict[str, float] = {}
    for entry in text.split(","):
        name, separator, value = (part.strip() for part in entry.partition("="))
        if name not in SCORER_NAMES:
            raise ConfigError(f"unknown scorer {name!r}; there are {', '.join(SCORER_NAMES)}")
        try:
            weights[name] = float(value)
        except ValueError:
            raise ConfigError(f"the weight of {name!r} must be a number, not {value!r}") from None
        if not separator or not 0 <= weights[name] < float("inf"):
            raise ConfigError(f"the weight of {name!r} must be a number >= 0, not {value!r}")
    return weights


def read_policy(
    text: str | None,
    flags: Mapping[str, Any],
    *,
    priorities: str | None = None,
    overload: bool | None = None,
    trust_objective: bool | None = None,
) -> PickPolicy:
    """Read `--policy`, `--priorities`, and the flags of single fields; later ones go before. Raise ConfigError."""
    fields = read_policy_fields(text, flags, priorities=priorities, overload=overload, trust_objective=trust_objective)
    return pick_policy({name: part for name, part in fields.items() if name != "models"})[0]


def read_policy_fields(
    text: str | None,
    flags: Mapping[str, Any],
    *,
    priorities: str | None = None,
    overload: bool | None = None,
    trust_objective: bool | None = None,
    models: str | None = None,
) -> Mapping[str, Any]:
    """Return the same and `--models` as fields of an InferencePolicy: below the mesh's policies it counts by field."""
    single: dict[str, dict[str, Any]] = {"scoring": {}, "load": {}, "priorities": {}}
    for section, name, value in (
        ("scoring", "strategy", flags.get("strategy")),
        ("scoring", "weights", flags.get("weights")),
        ("load", "staleAfterSeconds", flags.get("stale_after_seconds")),
        ("load", "overload", None if overload is None else {"enabled": overload}),
        ("priorities", "trustObjective", trust_objective),
    ):
        if value is not None:
            single[section][name] = value
    if "weights" in single["scoring"]:  # the flag names all that count
        single["scoring"]["weights"] = dict.fromkeys(SCORER_NAMES, 0.0) | single["scoring"]["weights"]
    fields = _file_fields(text, flag="--policy", read=read_policy_file)
    given = {name: part for name, part in single.items() if part}
    for above in (
        _file_fields(priorities, flag="--priorities", read=partial(read_section, "priorities")),
        read_spec(given) if given else {},
        _file_fields(models, flag="--models", read=partial(read_section, "models")),
    ):
        fields = lay_over(fields, above, resets=RESETS)
    return fields


def read_models(text: str | None, *, policy: str | None = None) -> ModelTable:
    """Read `--models`, and the models of `--policy` as far as it says nothing of them. Raise ConfigError."""
    fields = read_policy_fields(policy, {}, models=text)
    return pick_policy({"models": fields["models"]} if "models" in fields else {})[1]


def _file_fields(text: str | None, *, flag: str, read: Callable[[object], dict[str, Any]]) -> dict[str, Any]:
    if not text:
        return {}
    document = _document(text, flag=flag)
    try:
        return read(document)
    except PolicyDocumentError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _document(text: str, *, flag: str) -> object:
    """Return what a setting says: a file's path, JSON, or `name=value,…`, which is how a flat YAML mapping arrives."""
    if text.lstrip().startswith(("{", "[")):
        return read_yaml(text, where=flag)
    path = Path(text)
    if "=" not in text or _is_file(path):
        try:
            return read_yaml(path.read_text(encoding="utf-8"), where=f"{flag} {text}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{flag}: cannot read {text}: {error}") from error
    return {
        name.strip(): read_yaml(value, where=flag)
        for name, _, value in (part.partition("=") for part in text.split(","))
    }


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a long `name=value,…` is no name that a file may have
        return False

"""The picker's settings, checked once at start-up; the command line fills them, nothing changes them later."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import yaml

from extproc.errors import ConfigError
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pods.endpoint import Role
from extproc.policy.inference_policy import RESETS, read_policy_file, read_section, read_spec
from extproc.policy.merge import lay_over
from extproc.policy.merged_policy import pick_policy
from extproc.policy.reading import PolicyDocumentError
from extproc.policy.values import SCORER_NAMES, PickPolicy, Steering
from extproc.settings.observation_settings import ObservationSettings
from extproc.settings.yaml_mistake import yaml_mistake
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.redis.address import RedisAccess


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerSettings:
    """Everything `kvmesh extproc` can be told."""

    host: str
    grpc_port: int
    admin_port: int
    redis_url: RedisAccess | str  # a plain address has no files beside it
    endpoints: tuple[str, ...]
    model: str | None
    tokenizer_folder: Path | None
    hash_seed: str
    known_models: frozenset[str]
    steering: Steering
    index_timeout_seconds: float
    scrape_interval_seconds: float
    scrape_timeout_seconds: float
    max_body_bytes: int
    drain_seconds: float
    otlp_endpoint: str | None
    policy: PickPolicy = field(default_factory=PickPolicy)
    models: ModelTable = field(default_factory=ModelTable)
    shares_load: bool = True  # tell other replicas what is booked, and hear it from them
    sample_share: float = 0.02  # of the responses, 0..1, read for usage whatever their size
    token_budget: int = 500_000  # tokens of one request that are tokenized; what is beyond is not looked up
    render_timeout_seconds: float = 0.5  # for a pod's answer to /render; prompts with media have four times as long
    read_below_bytes: int = 16384  # a response that is no stream and at most so long is read for usage; 0: none
    reads_per_second: float = 5.0  # of these, at most: reading one costs as much as a fifth of a pick
    kubernetes: bool = False  # follow the pods, pools and policies of the cluster
    policies_folder: Path | None = None  # follow the same documents in a folder
    policy_fields: Mapping[str, Any] = field(default_factory=dict)  # what flags say, as an InferencePolicy's fields
    root_namespace: str = "istio-system"  # whose policies are for the whole mesh
    namespaces: frozenset[str] = frozenset()  # that are followed; empty: all
    tokenizer_folders: Path | None = None  # a folder for each model that only pods tell of, by its name
    admin_access: AdminAccess = field(default_factory=AdminAccess)  # who may see the admin pages
    observation: ObservationSettings = field(default_factory=ObservationSettings)  # what is written down of requests

    @property
    def follows_mesh(self) -> bool:
        """Whether pools and policies come from documents that may change at any time."""
        return self.kubernetes or self.policies_folder is not None

    @property
    def model_table(self) -> ModelTable:
        """Return the models with the one of `--model`, unless they name it already."""
        if self.model is None or self.models.served_as(self.model) is not None:
            return self.models
        one = ServedModel(
            name=self.model,
            tokens_from=TokensFrom.TEXT if self.tokenizer_folder is None else TokensFrom.TOKENIZER,
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
    for above in (
        _file_fields(priorities, flag="--priorities", read=partial(read_section, "priorities")),
        read_spec({name: part for name, part in single.items() if part}),
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
        return _yaml(text, where=flag)
    path = Path(text)
    if "=" not in text or _is_file(path):
        try:
            return _yaml(path.read_text(encoding="utf-8"), where=f"{flag} {text}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{flag}: cannot read {text}: {error}") from error
    return {
        name.strip(): _yaml(value, where=flag) for name, _, value in (part.partition("=") for part in text.split(","))
    }


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a long `name=value,…` is no name that a file may have
        return False


def _yaml(text: str, *, where: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not readable as YAML: {yaml_mistake(error)}") from None

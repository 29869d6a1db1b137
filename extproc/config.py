"""The picker's settings, checked once at start-up; the command line fills them, nothing changes them later."""

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from extproc.core.policy import PickPolicy, Steering
from extproc.core.scorers import SCORERS
from extproc.errors import ConfigError
from kv_indexer.api import RedisAccess


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

    def __post_init__(self) -> None:
        if self.tokenizer_folder is not None and self.model is None:
            raise ConfigError("--tokenizer is given without --model: name the model whose tokenizer it is")


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
        if not port.isdigit() or not 0 < int(port) < 65536 or bracketed != (version == 6):
            raise ConfigError(f"endpoint {entry!r} is not IP:PORT (IPv6 as [::1]:8000)")
    if len(set(entries)) != len(entries):
        raise ConfigError(f"an endpoint is listed twice in {text!r}")
    return entries


def parse_names(text: str | None) -> frozenset[str]:
    """Split `name,name`; None and the empty text are no names."""
    return frozenset(name.strip() for name in (text or "").split(",") if name.strip())


def parse_weights(text: str) -> dict[str, float]:
    """Read `scorer=weight,…`; scorers left out keep weight 0. Raise ConfigError for an unknown scorer."""
    weights: dict[str, float] = {}
    for entry in text.split(","):
        name, separator, value = (part.strip() for part in entry.partition("="))
        if name not in SCORERS:
            raise ConfigError(f"unknown scorer {name!r}; there are {', '.join(SCORERS)}")
        try:
            weights[name] = float(value)
        except ValueError:
            raise ConfigError(f"the weight of {name!r} must be a number, not {value!r}") from None
        if not separator or not 0 <= weights[name] < float("inf"):
            raise ConfigError(f"the weight of {name!r} must be a number >= 0, not {value!r}")
    return weights

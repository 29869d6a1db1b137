"""Where the external-metrics API listens, and with which certificate."""

from dataclasses import dataclass
from pathlib import Path

from extproc.errors import ConfigError
from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalMetricsSettings:
    """The HTTPS port on which the API server asks; no port: the API is not served."""

    port: int | None = setting(
        None,
        "HTTPS port of the Kubernetes external-metrics API, for the API server alone; needs --kubernetes "
        "(docs/guides/autoscaling.md). Default: it is not served.",
        "external_metrics_port",
        least=1,
        most=65535,
    )
    cert: Path | None = setting(
        None,
        "PEM file with the certificate of that port; read anew when it changes, and waited for while it is missing.",
        "external_metrics_cert",
    )
    key: Path | None = setting(
        None, "PEM file with the key of --external-metrics-cert. Default: it is in that file.", "external_metrics_key"
    )

    def __post_init__(self) -> None:
        """Raise ConfigError where one is of no use without another."""
        if self.port is not None and self.cert is None:
            raise ConfigError(
                "--external-metrics-port without --external-metrics-cert: the API server speaks TLS alone"
            )
        if self.port is None and (self.cert is not None or self.key is not None):
            raise ConfigError("--external-metrics-cert and --external-metrics-key without --external-metrics-port")
        if self.cert is None and self.key is not None:
            raise ConfigError("--external-metrics-key without --external-metrics-cert")

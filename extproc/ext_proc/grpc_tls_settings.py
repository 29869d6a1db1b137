"""How Envoy's connections are encrypted."""

from dataclasses import dataclass
from pathlib import Path

from extproc.errors import ConfigError
from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcTlsSettings:
    """TLS of the gRPC port; nothing given: clear text."""

    cert: Path | None = setting(
        None,
        "PEM file with the certificate of the gRPC port; read anew when it changes. Default: clear text.",
        "grpc_tls_cert",
    )
    key: Path | None = setting(
        None, "PEM file with the key of --grpc-tls-cert. Default: it is in that file.", "grpc_tls_key"
    )
    self_signed: bool = setting(
        False,
        "TLS on the gRPC port with a certificate made at the start by openssl, for callers that check none.",
        "grpc_tls_self_signed",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError where one is of no use without another."""
        if self.cert is None and self.key is not None:
            raise ConfigError("--grpc-tls-key without --grpc-tls-cert")
        if self.cert is not None and self.self_signed:
            raise ConfigError("--grpc-tls-self-signed and --grpc-tls-cert: give the one or the other")

    @property
    def is_used(self) -> bool:
        """Whether the port speaks TLS."""
        return self.cert is not None or self.self_signed

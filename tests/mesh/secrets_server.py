"""The certificates of proxies, served over SDS as istio-agent does: each gets the identity that its metadata names.

A certificate authority of this process' own signs them; https://github.com/spiffe/spiffe gives the form of the names.
"""

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from envoy.extensions.transport_sockets.tls.v3 import secret_pb2
from envoy.service.discovery.v3 import discovery_pb2

SECRET_TYPE = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
SERVICE = "envoy.service.secret.v3.SecretDiscoveryService"
TRUST_DOMAIN = "cluster.local"
OPENSSL_SECONDS = 30


def spiffe_name(namespace: str, service_account: str) -> str:
    """Return the name of a workload in its certificate."""
    return f"spiffe://{TRUST_DOMAIN}/ns/{namespace}/sa/{service_account}"


class Authority:
    """A certificate authority whose files are in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.root, self._key = folder / "root.crt", folder / "root.key"
        self._made: dict[str, tuple[bytes, bytes]] = {}
        _openssl(
            *("req", "-x509", *_CURVE, "-days", "2", "-subj", "/O=tests/CN=root"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            *("-keyout", str(self._key), "-out", str(self.root)),
        )

    def workload(self, namespace: str, service_account: str) -> tuple[bytes, bytes]:
        """Return certificate and key of a workload, as PEM."""
        name = spiffe_name(namespace, service_account)
        if name not in self._made:
            self._made[name] = self._sign(f"{namespace}.{service_account}", f"URI:{name}")
        return self._made[name]

    def server(self, host: str) -> tuple[bytes, bytes]:
        """Return certificate and key of a public host, as PEM."""
        return self._sign(host, f"DNS:{host}")

    def _sign(self, name: str, alternative: str) -> tuple[bytes, bytes]:
        key, request, cert = (self._folder / f"{name}.{kind}" for kind in ("key", "csr", "crt"))
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName=critical,{alternative}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl("req", *_CURVE, "-subj", "/O=tests", "-keyout", str(key), "-out", str(request))
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.root), "-CAkey", str(self._key)),
            *("-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(cert)),
        )
        return cert.read_bytes(), key.read_bytes()


_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=OPENSSL_SECONDS)


class _Secrets:
    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    async def stream(self, requests: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
        """Answer each first request for a name; what follows on the stream acknowledges it."""
        node: Any = None
        async for request in requests:
            node = request.node if request.node.id else node
            if request.version_info:
                continue
            secrets = [self._secret(name, node.metadata) for name in request.resource_names]
            answer = discovery_pb2.DiscoveryResponse(version_info="1", nonce="1", type_url=SECRET_TYPE)
            for secret in secrets:
                answer.resources.add().Pack(secret)
            yield answer

    def _secret(self, name: str, metadata: Any) -> Any:
        if name == "ROOTCA":
            root = {"inline_bytes": self._authority.root.read_bytes()}
            return secret_pb2.Secret(name=name, validation_context={"trusted_ca": root})
        cert, key = self._authority.workload(metadata["NAMESPACE"], metadata["SERVICE_ACCOUNT"])
        pair = {"certificate_chain": {"inline_bytes": cert}, "private_key": {"inline_bytes": key}}
        return secret_pb2.Secret(name=name, tls_certificate=pair)


@asynccontextmanager
async def secrets_server(authority: Authority, socket: Path) -> AsyncIterator[None]:
    """Serve on a Unix socket until the block ends."""
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(
        _Secrets(authority).stream,
        request_deserializer=discovery_pb2.DiscoveryRequest.FromString,
        response_serializer=discovery_pb2.DiscoveryResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler(SERVICE, {"StreamSecrets": method})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=None)

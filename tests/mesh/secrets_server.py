"""The certificates of proxies, served over SDS as istio-agent does: each gets the identity that its metadata names.

https://github.com/spiffe/spiffe gives the form of the names in them.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from envoy.extensions.transport_sockets.tls.v3 import secret_pb2
from envoy.service.discovery.v3 import discovery_pb2

from tests.kube_api.certificates import Authority, ServerCertificate

SECRET_TYPE = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
SERVICE = "envoy.service.secret.v3.SecretDiscoveryService"
TRUST_DOMAIN = "cluster.local"


def spiffe_name(namespace: str, service_account: str) -> str:
    """Return the name of a workload in its certificate."""
    return f"spiffe://{TRUST_DOMAIN}/ns/{namespace}/sa/{service_account}"


class _Secrets:
    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._issued: dict[str, ServerCertificate] = {}

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
            root = {"inline_bytes": self._authority.cert.read_bytes()}
            return secret_pb2.Secret(name=name, validation_context={"trusted_ca": root})
        identity = spiffe_name(metadata["NAMESPACE"], metadata["SERVICE_ACCOUNT"])
        if identity not in self._issued:
            file = f"{metadata['NAMESPACE']}.{metadata['SERVICE_ACCOUNT']}"
            self._issued[identity] = self._authority.issue(file, subject="/O=tests", names=f"URI:{identity}")
        made = self._issued[identity]
        pair = {
            "certificate_chain": {"inline_bytes": made.cert.read_bytes()},
            "private_key": {"inline_bytes": made.key.read_bytes()},
        }
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

"""The pods' HTTP pages for all who ask in this process: one kept connection a pod. Used by the service."""

import asyncio

from kvmesh.pods.http_response import HttpResponse
from kvmesh.pods.pod_http import PodHttp

CONNECT_SECONDS = 2.0


class PodPages:
    """Asks pods, by endpoint. `forget` those that are gone, and `close` at the end."""

    def __init__(self) -> None:
        self._pods: dict[str, PodHttp] = {}

    async def get(self, endpoint: str, path: str, *, timeout_seconds: float, max_body_bytes: int) -> HttpResponse:
        """Return what the pod answers. Raise HttpResponseError or OSError (TimeoutError is one)."""
        pod = self._pods.get(endpoint)
        if pod is None:
            pod = self._pods[endpoint] = PodHttp(endpoint, connect_seconds=CONNECT_SECONDS)
        async with asyncio.timeout(timeout_seconds):
            return await pod.get(path, max_body_bytes=max_body_bytes)

    def forget(self, endpoint: str) -> None:
        """Close what is kept of a pod."""
        pod = self._pods.pop(endpoint, None)
        if pod is not None:
            pod.close()

    def close(self) -> None:
        """Close what is kept of all."""
        for endpoint in tuple(self._pods):
            self.forget(endpoint)

"""Reads and writes the `scale` subresource of Deployments, and says which autoscaler has one for its target."""

import asyncio

from lightkube.models.autoscaling_v1 import ScaleSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.autoscaling_v2 import HorizontalPodAutoscaler

from kvmesh.documents.documents import ClusterAccess
from kvmesh.documents.kubernetes_client import Connection, failure_of
from kvmesh.documents.scales import ScaleRequestError, SeenScale

REQUEST_SECONDS = 10.0


class DeploymentScales:
    """All Deployments that we may reach."""

    def __init__(self, access: ClusterAccess) -> None:
        """Raise KubernetesConfigError where there is no configuration."""
        self._connection = Connection(access)

    async def read(self, namespace: str, name: str) -> SeenScale:
        """Return the scale. Raise ScaleRequestError."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                scale = await self._connection.client.get(Deployment.Scale, name, namespace=namespace)
        except Exception as error:
            raise await self._failure(error) from error
        version = (scale.metadata.resourceVersion if scale.metadata is not None else None) or ""
        return SeenScale(replicas=(scale.spec.replicas if scale.spec is not None else None) or 0, version=version)

    async def write(self, namespace: str, name: str, replicas: int, *, seen: SeenScale, dry_run: bool) -> None:
        """Write the number over what was seen, or have the server try it. Raise ScaleRequestError, 409 of a change."""
        scale = Deployment.Scale(
            metadata=ObjectMeta(name=name, namespace=namespace, resourceVersion=seen.version),
            spec=ScaleSpec(replicas=replicas),
        )
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._connection.client.replace(scale, name, namespace=namespace, dry_run=dry_run)
        except Exception as error:
            raise await self._failure(error) from error

    async def autoscaler_of(self, namespace: str, name: str) -> str | None:
        """Return the HorizontalPodAutoscaler whose target it is, KEDA's, too. Raise ScaleRequestError."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                async for each in self._connection.client.list(HorizontalPodAutoscaler, namespace=namespace):
                    target = each.spec.scaleTargetRef if each.spec is not None else None
                    if target is not None and (target.kind, target.name) == ("Deployment", name):
                        return str(each.metadata.name) if each.metadata is not None else ""
        except Exception as error:
            raise await self._failure(error) from error
        return None

    async def close(self) -> None:
        """Close all connections."""
        await self._connection.close()

    async def _failure(self, error: BaseException) -> ScaleRequestError:
        failure = failure_of(error)
        if failure.is_of_all:
            await self._connection.renew()
        return ScaleRequestError(failure.message, code=failure.code)

"""What is read of a Deployment's scale, and how a request for it fails. Values."""

from dataclasses import dataclass
from typing import Protocol


class ScaleRequestError(Exception):
    """A request that was not granted."""

    def __init__(self, message: str, *, code: int | None) -> None:
        """`code`: the HTTP status, None where nobody answered."""
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenScale:
    """A Deployment's scale as it was read."""

    replicas: int
    version: str  # of the resource; a write of another one is refused


class Scales(Protocol):
    """See `scale_subresource.DeploymentScales`."""

    async def read(self, namespace: str, name: str) -> SeenScale:
        """Return the scale. Raise ScaleRequestError."""

    async def write(self, namespace: str, name: str, replicas: int, *, seen: SeenScale, dry_run: bool) -> None:
        """Write the number over what was seen, or have the server try it. Raise ScaleRequestError."""

    async def autoscaler_of(self, namespace: str, name: str) -> str | None:
        """Return the HorizontalPodAutoscaler whose target it is. Raise ScaleRequestError."""

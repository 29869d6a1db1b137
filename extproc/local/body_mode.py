"""The two ways in which Envoy can hand a request body to the picker; a flag of `kvmesh up`."""

from enum import StrEnum


class BodyMode(StrEnum):
    """How Envoy hands request bodies to the picker; each has its file in `envoy/`."""

    DUPLEX = "duplex"
    BUFFERED = "buffered"

    @property
    def envoy_file(self) -> str:
        """The file's name in `envoy/`."""
        return "local.yaml" if self is BodyMode.DUPLEX else "buffered.yaml"

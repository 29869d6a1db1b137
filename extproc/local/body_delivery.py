"""The two ways in which Envoy can hand a request body to the picker; a flag of `kvmesh up`."""

from enum import StrEnum


class BodyDelivery(StrEnum):
    """How Envoy hands request bodies to the picker; each has its file in `envoy/`."""

    DUPLEX = "duplex"
    BUFFERED = "buffered"

    @property
    def envoy_file(self) -> str:
        """The file's name in `envoy/`."""
        return "local.yaml" if self is BodyDelivery.DUPLEX else "buffered.yaml"

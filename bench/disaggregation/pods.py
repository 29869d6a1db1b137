"""Simulated pods in virtual time, with the links over which prompts move between them."""

from bench.virtual_pod import VirtualPod
from podsim.core.link import Link, LinkSettings
from podsim.core.scheduler import EngineSettings


class Pod(VirtualPod):
    """One engine and its link."""

    def __init__(self, address: str, *, engine: EngineSettings, link: LinkSettings) -> None:
        super().__init__(address, engine)
        self.link = Link(link.bytes_per_second)
        self.link_due: float | None = None  # when a transfer on it ends

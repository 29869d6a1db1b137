"""The metrics of several pools as one page: each pool counts in a registry of its own, and `pool` is added here.

Counting costs a pick nothing for it. Called by `pools_pages`, on the event loop: the registries are not for threads.
"""

from prometheus_client import CollectorRegistry, generate_latest

from extproc.telemetry.metrics_text import metric_lines, quoted
from extproc.telemetry.process_telemetry import process_exposition


class PoolsExposition:
    """Puts the same families of all pools together: a page must have each name once."""

    def __init__(self) -> None:
        self._families: dict[bytes, list[bytes]] = {}  # in the order of the first pool: comment -> lines

    async def add(self, pool: str, registry: CollectorRegistry) -> None:
        """Take one pool's metrics in, in turns of the loop."""
        async for comment, lines in metric_lines(registry, label=f'pool="{quoted(pool)}"'):
            self._families.setdefault(comment, []).append(lines)

    def text(self, *, own: CollectorRegistry, ready: bool | None = None) -> bytes:
        """Return the page: all pools, then what belongs to none, then the process."""
        parts = [part for comment, lines in self._families.items() for part in (comment, *lines)]
        return b"".join((*parts, generate_latest(own), process_exposition(ready=ready)))

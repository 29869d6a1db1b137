"""The metrics of several pools as one page: each pool counts in a registry of its own, and `pool` is added here.

Counting costs a pick nothing for it. Called by `pools_pages`, on the event loop: the registries are not for threads.
"""

from prometheus_client import CollectorRegistry, generate_latest

HELP, TYPE = "# HELP ", "# TYPE "


class PoolsExposition:
    """Puts the same families of all pools together: a page must have each name once."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}  # in the order of the first pool; each with its two lines of comment

    def add(self, pool: str, registry: CollectorRegistry) -> None:
        """Take one pool's metrics in."""
        quoted = pool.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")  # in a folder anything may stand
        label = f'pool="{quoted}"'
        lines: list[str] = []
        is_wanted = is_new = True
        # not `splitlines`: a model's name may hold what that takes for the end of a line
        for line in generate_latest(registry).decode().rstrip("\n").split("\n"):
            if line.startswith(HELP):
                name = line.split(" ", 3)[2]
                is_wanted = not name.endswith("_created")
                if is_wanted:
                    is_new = name not in self._families
                    lines = self._families.setdefault(name, [])
                    if is_new:
                        lines.append(line)
            elif not is_wanted:
                continue
            elif line.startswith(TYPE):
                if is_new:
                    lines.append(line)
            else:
                name, brace, rest = line.partition("{")
                if brace:
                    lines.append(f"{name}{{{label},{rest}")
                else:
                    name, _, value = line.partition(" ")
                    lines.append(f"{name}{{{label}}} {value}")

    def text(self, *, own: CollectorRegistry) -> bytes:
        """Return the page: all pools, then what belongs to none."""
        lines = [line for family in self._families.values() for line in family]
        return "".join(f"{line}\n" for line in lines).encode() + generate_latest(own)

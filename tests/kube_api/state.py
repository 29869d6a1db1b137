"""All that one server knows, shared by the requests. Outlives a restart, as etcd does."""

import functools
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from tests.kube_api.access import Access
from tests.kube_api.deleting import finish_waiting
from tests.kube_api.faults import Faults
from tests.kube_api.registry import Registry
from tests.kube_api.store import Store
from tests.kube_api.watching import Watch
from tests.kube_api.writing import Writer


@dataclass(slots=True, kw_only=True)
class State:
    """The store and who may use it, the switches for faults, and what was asked."""

    store: Store = field(default_factory=Store)
    registry: Registry = field(default_factory=Registry)
    faults: Faults = field(default_factory=Faults)
    requests: list[tuple[str, str, str, str]] = field(default_factory=list)  # verb, plural, path with query, user
    watches: list[Watch] = field(default_factory=list)
    watch_seconds: float = 1_800.0  # of a watch that names no timeoutSeconds
    bookmark_seconds: float = 60.0
    clock_offset_seconds: float = 0.0
    access: Access = field(init=False)
    writer: Writer = field(init=False)

    def __post_init__(self) -> None:
        self.access = Access(self.store)
        self.writer = Writer(self.store, self.registry, self.now)
        self.writer.after_drop = functools.partial(finish_waiting, self.writer)

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.clock_offset_seconds)

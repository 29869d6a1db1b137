"""The key for pods, read from a file that may be rewritten at any time, as mounted Secrets are.

The key is part of no message, no log line and no repr. `pod_http` alone sends it, to the requested pods.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvmesh.errors import SettingError
from kvmesh.pods.pod_access import PodAccess, read_pod_key
from kvmesh.secret_file import stamp_of

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two checks of the file


class PodKey:
    """The key in the file now; while the file is unusable, the last good one."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen: tuple[int, ...] | None = None
        self._looked_at = 0.0  # monotonic seconds
        self._header = ""
        self.problem = ""  # why the file cannot be used, or ""
        self._look()

    def header(self) -> str:
        """Return the line of a request's head with the key, or "" if there was never a good one."""
        if self._clock() - self._looked_at >= LOOK_SECONDS:
            self._look()
        return self._header

    def _look(self) -> None:
        """Read the file if it has changed; log once if it is unusable."""
        self._looked_at = self._clock()
        seen = stamp_of(self._path)
        if seen == self._seen:
            return
        is_first, self._seen = self._seen is None, seen
        try:
            self._header = f"Authorization: Bearer {read_pod_key(self._path)}\r\n"
        except SettingError as error:
            self.problem = str(error)
            log.error("pods are shown %s: %s", "the last good key" if self._header else "no key", error)
            return
        self.problem = ""
        if not is_first:
            log.info("the file with the pods' key was read anew")


def open_key(access: PodAccess) -> PodKey | None:
    """Return the configured key, or None if there is none."""
    return None if access.key_file is None else PodKey(access.key_file)

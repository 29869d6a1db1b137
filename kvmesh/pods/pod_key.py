"""The key that pods are shown: follows its file, which may be written anew at any time, as mounted Secrets are.

The key is part of no message, no log line and no repr. `pod_http` alone sends it, to the pods that it is asked for.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvmesh.errors import SettingError
from kvmesh.pods.pod_access import PodAccess, read_pod_key
from kvmesh.secret_file import stamp_of

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks whether the file has changed


class PodKey:
    """The key as its file says now; while that cannot be used, the last good one."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen: tuple[int, ...] | None = None
        self._looked_at = 0.0  # monotonic seconds
        self._header = ""
        self.problem = ""  # why the file cannot be used; "": it can
        self._look()

    def header(self) -> str:
        """Return the line of a request's head that shows the key, "" while there was never a good one."""
        if self._clock() - self._looked_at >= LOOK_SECONDS:
            self._look()
        return self._header

    def _look(self) -> None:
        """Read the file where it is another one than before; where it is not as it must be, say so once."""
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
    """Return the key that is to be shown, None where there is none to show."""
    return None if access.key_file is None else PodKey(access.key_file)

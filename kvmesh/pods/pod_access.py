"""Access to pods that want a key (`--api-key`): the file with the key, and the meaning of a refusal.

The key is never part of a message. Pure, except for reading the given file.
"""

from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import SettingError
from kvmesh.secret_file import read_secret
from kvmesh.settings import setting

MAX_KEY_BYTES = 4096  # servers accept a header of some kilobytes
UNAUTHORIZED, FORBIDDEN = 401, 403  # HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAccess:
    """The credentials for pods that want a key."""

    key_file: Path | None = setting(
        None,
        "File with the API key of all pods (vLLM's --api-key); reloaded on change. Default: no key.",
        "pod_key_file",
        metavar="FILE",
    )

    def require_usable(self) -> None:
        """Raise SettingError if the file cannot be used; called once, for options from the command line."""
        if self.key_file is not None:
            read_pod_key(self.key_file)


def read_pod_key(path: Path) -> str:
    """Return the key of a file. Raise SettingError with the fault of the file, but not its content."""
    content = read_secret(path, what="pod key")
    key = content[:-2] if content.endswith(b"\r\n") else content.removesuffix(b"\n")  # as editors leave it
    where = f"the pod key file {path}"
    if not key:
        raise SettingError(f"{where} is empty: it needs the key that the pods have as --api-key")
    if b"\n" in key or b"\r" in key:
        raise SettingError(f"{where} has more than one line: a pod is shown one key")
    if any(not 0x21 <= byte <= 0x7E for byte in key):
        raise SettingError(f"{where} has a space or another character that does not fit: a key is visible ASCII")
    if len(key) > MAX_KEY_BYTES:
        raise SettingError(f"{where} has a key of more than {MAX_KEY_BYTES} bytes")
    return key.decode("ascii")


def why_refused(status: int, *, shows_key: bool) -> str | None:
    """Return why a pod refuses us, and which flag to give; None if its answer is no such refusal."""
    if status == UNAUTHORIZED:
        if shows_key:
            return "the pod does not take the key of --pod-key-file (401): compare that file with its --api-key"
        return "the pod wants a key: give --pod-key-file"
    if status == FORBIDDEN:
        hint = "compare the file of --pod-key-file with its --api-key" if shows_key else "give --pod-key-file"
        return f"the pod, or a proxy before it, refuses (403): if it wants a key, {hint}"
    return None

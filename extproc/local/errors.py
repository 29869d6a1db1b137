"""What can end `kvmesh up` early; each message is the one line that the user reads."""

from collections.abc import Sequence

from extproc.errors import KvmeshError


class UpError(KvmeshError):
    """`kvmesh up` cannot start or go on; `log_lines` are the last words of the process that is to blame."""

    def __init__(self, message: str, *, log_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.log_lines = tuple(log_lines)

    def __str__(self) -> str:
        return "\n    ".join((self.message, *self.log_lines))


class BadSettingError(UpError):
    """A flag has a value that cannot be used; the message names the flag."""


class BadEndpointError(BadSettingError):
    """An address of --endpoints cannot be resolved."""


class PortInUseError(BadSettingError):
    """A fixed port is taken by another program."""


class MissingProgramError(UpError):
    """A program that `kvmesh up` starts is not installed."""


class ChildEndedError(UpError):
    """A child process ended that was not asked to."""


class NotReadyError(UpError):
    """Something did not become ready before its deadline."""


class UnnamedModelError(UpError):
    """No pod says which model it serves, and no flag does."""


class BrokenTemplateError(UpError):
    """An Envoy file lacks the listener or cluster that is to be filled in."""

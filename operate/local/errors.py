"""Errors that end `kvmesh up`. The user sees the message only."""

from collections.abc import Sequence

from extproc.errors import KvmeshError


class UpError(KvmeshError):
    """`kvmesh up` cannot start or continue; `log_lines` are the last lines of the process at fault."""

    def __init__(self, message: str, *, log_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.log_lines = tuple(log_lines)

    def __str__(self) -> str:
        return "\n    ".join((self.message, *self.log_lines))


class BadSettingError(UpError):
    """A flag has an unusable value; the message names the flag."""


class BadEndpointError(BadSettingError):
    """An address of --endpoints cannot be resolved."""


class PortInUseError(BadSettingError):
    """A fixed port is taken by another program."""


class MissingProgramError(UpError):
    """A program that `kvmesh up` starts is not installed."""


class ChildEndedError(UpError):
    """A child process ended unexpectedly."""


class NotReadyError(UpError):
    """Something did not become ready before its deadline."""


class UnnamedModelError(UpError):
    """Neither a pod nor a flag names the model."""


class BrokenTemplateError(UpError):
    """An Envoy file lacks a listener or cluster to fill in."""

"""The doctor's findings: one per relevant fact, with the observation and the fix. Values only."""

from collections.abc import Iterable
from enum import StrEnum
from functools import partial

import msgspec


class Severity(StrEnum):
    """The severity of a finding; it determines the exit code."""

    ERROR = "error"  # routing is wrong or blind
    WARNING = "warning"  # works, but costs something or will fail later
    UNCHECKED = "unchecked"  # could not be checked
    OK = "ok"


WORST_FIRST = tuple(Severity)
ERRORS_FOUND, NOT_ALL_CHECKED = 1, 2  # exit codes


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report; the field names are those of `-o json`."""

    check: str  # a name of `checks.CHECKS`, and a section of docs/reference/doctor.md
    severity: Severity
    subject: str  # HOST:PORT of a pod, a model, `redis`, `envoy`, …
    seen: str
    fix: str = ""  # "" if nothing needs fixing


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 for any error, else 2 if anything could not be checked, else 0."""
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        return ERRORS_FOUND
    return NOT_ALL_CHECKED if Severity.UNCHECKED in severities else 0


def _finding(severity: Severity, subject: str, seen: str, *, fix: str) -> Finding:
    return Finding(check="", severity=severity, subject=subject, seen=seen, fix=fix)


# constructors for the checks; the runner of a check fills in its name
error = partial(_finding, Severity.ERROR)
warning = partial(_finding, Severity.WARNING)
unchecked = partial(_finding, Severity.UNCHECKED)
fine = partial(_finding, Severity.OK, fix="")

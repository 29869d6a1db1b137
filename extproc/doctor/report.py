"""Prints findings, worst first, for people. What they say is shown as text, never as markup. Decides nothing."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from extproc.doctor.findings import WORST_FIRST, Finding, Severity
from kvmesh.plain_text import cut_end, printable

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.UNCHECKED: "magenta", Severity.OK: "green"}
WIDTH = max(len(severity) for severity in Severity)
SEEN_LIMIT = 600  # characters; answers of other programs may be long


def render(findings: Sequence[Finding], *, console: Console) -> None:
    """Print every finding, with its fix below it, and a last line that counts."""
    for finding in sorted(findings, key=lambda finding: WORST_FIRST.index(finding.severity)):
        line = Text(finding.severity.value.ljust(WIDTH + 1), style=STYLES[finding.severity])
        about = f"{finding.subject}: " if finding.subject else ""
        line.append(f"[{finding.check}] ", style="dim")
        line.append(cut_end(printable(about + finding.seen), limit=SEEN_LIMIT), style="none")
        console.print(line, soft_wrap=True)
        if finding.fix:
            console.print(Text(f"{' ' * (WIDTH + 1)}→ {printable(finding.fix)}"), soft_wrap=True)
    console.print(Text(summary(findings)))


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line."""
    counts = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    named = {
        Severity.ERROR: "errors",
        Severity.WARNING: "warnings",
        Severity.UNCHECKED: "not checked",
        Severity.OK: "checks fine",
    }
    return ", ".join(f"{counts[severity]} {name}" for severity, name in named.items() if counts[severity])

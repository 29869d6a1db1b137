"""The command `kvmesh policy simulate`, which is also `kvmesh simulate`. Imports late, to start fast."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from extproc.errors import ConfigError
from kvmesh.output.forms import Output, OutputForm, people_console, print_data

LONGEST_LINE = 1 << 20

app = typer.Typer()
policy = typer.Typer(no_args_is_help=True, help="What InferencePolicies come to.")
app.add_typer(policy, name="policy", help="What InferencePolicies come to.")


class ClassesBy(StrEnum):
    """What a request's class is replayed by."""

    LOG = "log"
    RULES = "rules"


@app.command("simulate")
@policy.command("simulate")
def simulate(
    policy_file: Annotated[
        Path,
        typer.Option("--policy", metavar="FILE", help="The policy that is asked about, as `policy check` takes it."),
    ],
    trace: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE", help="Access log or audit, - for stdin; may be repeated, such as for rotated files."
        ),
    ],
    beside: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A second policy to compare with, such as the present one.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option(metavar="NAMESPACE/NAME", help="Of several pools in the log, the one to replay.")
    ] = None,
    after: Annotated[
        datetime | None, typer.Option("--from", help="Earliest arrival to replay: 2026-01-31T09:00:00, in UTC.")
    ] = None,
    before: Annotated[
        datetime | None,
        typer.Option("--to", help="Time before which requests came that are replayed, likewise in UTC."),
    ] = None,
    pods: Annotated[int | None, typer.Option(min=1, max=1000, help="Pods. Default: as many as the log shows.")] = None,
    pod: Annotated[
        str,
        typer.Option(
            metavar="NAME=NUMBER,…",
            help="What a pod does, in place of what the log shows: prefill (prompt tokens a second), step-ms, "
            "stream-us (of each stream, on top), base-ms (of each request, on top), running (most at a time, 256), "
            "step-tokens (of a step, 2048), cache-tokens (500000).",
        ),
    ] = "",
    classes: Annotated[
        ClassesBy,
        typer.Option(
            help="log: each request has the class that it had. rules: what the policy's rules say that look at path "
            "and model alone."
        ),
    ] = ClassesBy.LOG,
    audit_key_file: Annotated[
        Path | None,
        typer.Option(help="The pickers' own, so that quotas that name tenants find them among the log's hashes."),
    ] = None,
    output: Output = OutputForm.TABLE,
) -> None:
    """Replay recorded traffic under a policy: who would have been served, refused, held back or degraded?

    The picker's own admission, queue, shedding, degradation, quotas and model rules decide, in virtual time; the pods
    are simulated, with the step times that the log shows. What the simulation does not know is in docs/limits.md.
    """
    from extproc.pools.pool_hosts import only_pool
    from extproc.replay_log.policy_file import read_policy, tenant_names
    from extproc.replay_log.question import Candidate, answer, read_pod
    from extproc.replay_log.read_log import read_log

    try:
        chosen = only_pool([pool]) if pool else pool  # "": the one of --endpoints, which has no name
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from error
    candidates = [Candidate(name, *read_policy(path)) for name, path in _named(policy_file, beside)]
    log = read_log(
        chain.from_iterable(map(_lines, trace)),
        pool=chosen,
        where=", ".join(map(str, trace)),
        after=after.replace(tzinfo=UTC).timestamp() if after is not None else float("-inf"),
        before=before.replace(tzinfo=UTC).timestamp() if before is not None else float("inf"),
    )
    finding = answer(
        log,
        candidates,
        names=tenant_names(audit_key_file, [each.policy for each in candidates]),
        pod=read_pod(pod),
        pods=pods,
        by_rules=classes is ClassesBy.RULES,
        told=_tell if sys.stderr.isatty() else _stay_silent,
    )
    if sys.stderr.isatty():
        _tell("")
    if output is not OutputForm.TABLE:
        print_data(finding.shown(), output)
        return
    from extproc.replay_log.finding_view import render

    render(finding, console=people_console())


def _tell(words: str) -> None:
    """Show how far it has come, in one line of the terminal."""
    sys.stderr.write(f"\r\x1b[K{words}")


def _stay_silent(_: str) -> None: ...


def _named(policy_file: Path, beside: Path | None) -> list[tuple[str, Path]]:
    """Return the policies by the names under which they are shown: those of their files, if these tell them apart."""
    from extproc.replay_log.question import RECORDED

    if beside is None:
        return [(str(policy_file) if policy_file.stem == RECORDED else policy_file.stem, policy_file)]
    if beside.stem == policy_file.stem or RECORDED in (beside.stem, policy_file.stem):
        return [(str(beside), beside), (str(policy_file), policy_file)]
    return [(beside.stem, beside), (policy_file.stem, policy_file)]


def _lines(path: Path) -> Iterator[bytes]:
    if str(path) == "-":
        yield from sys.stdin.buffer
        return
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                yield line
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None

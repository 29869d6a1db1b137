"""The command `kvmesh plan`: how many pods are wanted, of which kind, and what they cost. Imports late."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from kvmesh.admin.admin_login import AdminLogin
from kvmesh.options import takes_settings
from kvmesh.output.forms import AsJson, Output, OutputForm, chosen_form, people_console, print_data

app = typer.Typer(add_completion=False)


@app.callback()
def _group() -> None:
    """Keep `plan` a subcommand when this app runs alone."""


@app.command("plan")
@takes_settings
def plan(
    login: AdminLogin,
    picker: Annotated[
        str, typer.Option(metavar="URL", help="Admin address of a running picker.")
    ] = "http://127.0.0.1:9090",
    pool: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMESPACE/NAME", help="Pool to plan for, where there are several. Default: all."),
    ] = None,
    ahead: Annotated[
        str | None,
        typer.Option("--in", metavar="DURATION", help="Plan for what is expected then, like 30m or 1h. Default: now."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan for recorded requests: a Mooncake trace, or the picker's access log."),
    ] = None,
    times: Annotated[float, typer.Option(min=0.001, max=1e6, help="Trace: so many times as many requests.")] = 1.0,
    slot: Annotated[str, typer.Option(metavar="DURATION", help="Trace: what counts as one time.")] = "5m",
    pod: Annotated[
        list[str] | None,
        typer.Option(
            metavar="prefill=TOKENS,...",
            help="Trace: what a pod does, in place of what the picker has learned: prefill= and decode= tokens a "
            "second, streams=, price= an hour, min=, max=, and name= and role= where there are several kinds; "
            "repeated for each kind.",
        ),
    ] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(min=1, help="Trace: milliseconds promised to the first token. Default: the policy's")
    ] = None,
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
    timeout_ms: Annotated[float, typer.Option(min=1, help="Milliseconds to wait for the picker.")] = 5000,
) -> None:
    """Show how many pods are wanted, of which kind and why, and what they cost: now, in a while, or for a trace."""
    from extproc.errors import ConfigError
    from extproc.local import plan_view
    from extproc.local.trace_file import plan_file
    from extproc.pools.pool_hosts import only_pool
    from extproc.scaling.plan import Plan

    try:
        chosen = only_pool(pool)
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from error
    if trace is None and pod:
        raise ConfigError("--pod: only with --trace; for now and for a forecast the picker knows its pods")
    if trace is not None and ahead is not None:
        raise ConfigError("--in: not with --trace, which has its own times")
    seconds = 0.0 if ahead is None else plan_view.seconds_of(ahead, flag="--in")
    slot_seconds = plan_view.seconds_of(slot, flag="--slot")
    form, console = chosen_form(output, json=json), people_console()

    def asked() -> list[Plan]:
        return asyncio.run(
            plan_view.ask(picker, seconds=seconds, pool=chosen, timeout_seconds=timeout_ms / 1000, login=login)
        )

    if trace is not None:
        declared = plan_view.declared_roles(pod or ())
        found = plan_file(
            trace,
            declared,
            (lambda: []) if declared else asked,
            times=times,
            slot_seconds=slot_seconds,
            ttft_seconds=None if ttft_ms is None else ttft_ms / 1000,
        )
        if form is OutputForm.TABLE:
            plan_view.show_trace(found, console)
        else:
            print_data(found, form)
        return
    plans = asked()
    if form is OutputForm.TABLE:
        plan_view.show(plans, console)
    else:
        print_data(plans, form)
    if not any(each.roles for each in plans):
        raise typer.Exit(1)

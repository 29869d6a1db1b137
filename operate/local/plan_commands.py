"""The command `kvmesh plan`: desired pods by role and variant, and their cost. Imports late."""

import asyncio
from typing import Annotated

import typer

from kvmesh.admin.admin_login import AdminLogin
from kvmesh.options import takes_settings
from kvmesh.output.forms import Output, OutputForm, people_console, print_data
from operate.local.stack_settings import seconds_of
from operate.options import DEFAULT_PICKER, PickerUrl, only_pool

CALL_SECONDS = 5.0

app = typer.Typer(add_completion=False)


@app.command("plan")
@takes_settings
def plan(
    login: AdminLogin,
    picker: PickerUrl = DEFAULT_PICKER,
    pool: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMESPACE/NAME", help="Pool to plan for. Default: all."),
    ] = None,
    ahead: Annotated[
        str | None,
        typer.Option(
            "--in", metavar="DURATION", help="Plan for the load expected after this time, like 30m or 1h. Default: now."
        ),
    ] = None,
    output: Output = OutputForm.TABLE,
) -> None:
    """Show the desired pods by kind, with reason and cost, now or for a later time."""
    from operate.local import plan_view

    chosen = only_pool(pool)
    seconds = 0.0 if ahead is None else seconds_of(ahead, flag="--in")
    console = people_console()
    plans = asyncio.run(plan_view.ask(picker, seconds=seconds, pool=chosen, timeout_seconds=CALL_SECONDS, login=login))
    if output is OutputForm.TABLE:
        plan_view.show(plans, console)
    else:
        print_data(plans, output)
    if not any(each.roles for each in plans):
        raise typer.Exit(1)

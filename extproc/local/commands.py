"""The picker's subcommands: `extproc` (the role), `up` (the whole mesh on one machine), `explain`, `index lookup`.

Imports late what is heavy, to start fast. The indexer's package begins the group `index`.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from extproc.errors import ConfigError, KvmeshError, UnknownPoolError
from extproc.local.errors import BadSettingError, UpError
from extproc.local.stack_settings import StackSettings, completed
from extproc.settings.config import PickerSettings, PolicyFlags
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.heap import collector_at_rest
from kvmesh.logs import LOG_FORMAT, LOG_LEVEL
from kvmesh.options import fails_in_one_line, takes_settings
from kvmesh.output.forms import AsJson, Output, OutputForm, chosen_form, people_console, print_data
from kvmesh.plain_text import printable
from kvmesh.redis.address import RedisAccess

FAILURE, WRONG_USAGE = 1, 2

app = typer.Typer(add_completion=False)
index = typer.Typer()
app.add_typer(index, name="index")


@app.command("up")
@fails_in_one_line("up", {BadSettingError: WRONG_USAGE, UpError: FAILURE})
@takes_settings
def up(context: typer.Context, settings: StackSettings) -> None:
    """Start Redis, pods, indexer, picker and a real Envoy on this machine; Ctrl-C ends them all."""
    from extproc.local.service import run, simulated_tokenizer

    chosen = {"--log-level": context.meta.get(LOG_LEVEL), "--log-format": context.meta.get(LOG_FORMAT)}
    log_flags = tuple(word for flag, value in chosen.items() if value is not None for word in (flag, str(value)))
    asyncio.run(run(completed(settings, simulated_tokenizer=simulated_tokenizer(), log_flags=log_flags)))


@app.command("extproc")
@takes_settings
def run_picker(settings: PickerSettings, policy: PolicyFlags) -> None:
    """Run the endpoint picker: Envoy's ext_proc service."""
    with collector_at_rest():
        from extproc.service import load_ahead, serve

    if not settings.endpoints and not settings.follows_mesh:
        raise ConfigError("no pods: give --endpoints, --kubernetes, or --policies with a folder of documents")
    declared = policy.added_to(settings)
    if settings.respawn:
        from extproc.local.respawn import fork_until_it_ends

        with collector_at_rest():
            load_ahead(declared)
        fork_until_it_ends()
    _run(lambda stop: serve(declared, stop=stop))


@app.command("explain")
@takes_settings
def explain(
    login: AdminLogin,
    body: Annotated[str, typer.Argument(metavar="FILE|-", help="File with a request body as JSON, or - for stdin.")],
    picker: Annotated[
        str, typer.Option(metavar="URL", help="Admin address of a running picker.")
    ] = "http://127.0.0.1:9090",
    path: Annotated[
        str | None, typer.Option(help="The request's path. Default: by the body, chat or completions.")
    ] = None,
    objective: Annotated[str | None, typer.Option(help="Value of the header x-gateway-inference-objective.")] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE/NAME[:PORT]",
            help="Pool that the request is for, where there are several; ports, as `install` has them, are passed "
            "over.",
        ),
    ] = None,
    for_host: Annotated[
        str | None, typer.Option(help="Host that the request is for, where it tells the pool (docs/guides/pools.md).")
    ] = None,
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
    timeout_ms: Annotated[float, typer.Option(min=1, help="Milliseconds to wait for the picker.")] = 5000,
) -> None:
    """Show where a request would go and why, without sending it."""
    from extproc.local.explain import ask, known_there, render
    from extproc.local.explain_doubts import doubts
    from extproc.pages.picker_state import DecisionState
    from extproc.pools.pool_hosts import only_pool

    try:
        asked_pool = only_pool(pool)
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from error
    if path is not None and not path.startswith("/"):
        raise ConfigError(f"--path {path!r}: a path begins with /, as /v1/completions does")
    form = chosen_form(output, json=json)
    content = _read(body)
    answer = asyncio.run(
        ask(
            picker,
            body=content,
            path=path,
            objective=objective,
            timeout_seconds=timeout_ms / 1000,
            pool=asked_pool,
            host=for_host,
            login=login,
        )
    )
    decision = msgspec.json.decode(answer, type=DecisionState)
    if asked_pool is not None and decision.reason == UnknownPoolError.reason:
        raise ConfigError(f"--pool: {decision.message}")
    if form is OutputForm.TABLE:
        render(decision, console=people_console())
    else:
        print_data(msgspec.json.decode(answer), form)  # as the picker has it, fields that are new here among it
    there = asyncio.run(known_there(picker, pool=decision.pool or asked_pool, login=login))
    found = [] if there is None else list(doubts(decision, there, objective=objective, path=path, host=for_host))
    for doubt in found:
        typer.echo(printable(f"kvmesh explain: {doubt.words}"), err=True)
    code = max((doubt.exit_code for doubt in found), default=0)
    raise typer.Exit(max(code, FAILURE) if decision.endpoint is None else code)


@index.command("lookup")
@fails_in_one_line("index lookup", {ConfigError: WRONG_USAGE, KvmeshError: FAILURE})
@takes_settings
def lookup(
    access: RedisAccess,
    prompt: Annotated[
        str,
        typer.Argument(metavar="FILE|-", help="File with a request body, or with a JSON list of token ids; -: stdin."),
    ],
    model: Annotated[str, typer.Option(help="Model name as clients write it; part of every block key.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the model's tokenizer.json; token ids need none.")
    ] = None,
    hash_seed: Annotated[str, typer.Option(help="Seed of the block keys; the same as the indexer's.")] = "kvmesh",
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
    timeout_ms: Annotated[float, typer.Option(min=1, help="Milliseconds to wait for the index.")] = 5000,
) -> None:
    """Show who holds the beginning of a prompt, endpoint by endpoint."""
    from extproc.local.index_lookup import look_up, read_token_ids, render

    form = chosen_form(output, json=json)
    prompts = read_token_ids(_read(prompt), model=model, tokenizer=tokenizer)
    report = asyncio.run(look_up(access, prompts, model=model, hash_seed=hash_seed, timeout_seconds=timeout_ms / 1000))
    if form is OutputForm.TABLE:
        render(report, console=people_console())
    else:
        print_data(report, form)


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _run(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a role until SIGINT or SIGTERM."""
    import uvloop

    async def until_stopped() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(stop)

    uvloop.run(until_stopped())

"""`kvmesh up` (the whole mesh on one machine), `explain` and `index lookup`.

Heavy modules are imported late for a fast start. kv_indexer defines the other commands of the group `index`.
"""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from extproc.errors import ConfigError, KvmeshError, UnknownPoolError
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.logs import LOG_FORMAT, LOG_LEVEL
from kvmesh.options import CONFIG, fails_in_one_line, takes_settings
from kvmesh.output.forms import Output, OutputForm, people_console, print_data
from kvmesh.plain_text import printable
from kvmesh.redis.address import RedisAccess
from operate.local.errors import BadSettingError, UpError
from operate.local.stack_settings import StackSettings, completed
from operate.options import DEFAULT_PICKER, PickerUrl, only_pool

FAILURE, WRONG_USAGE = 1, 2
CALL_SECONDS = 5.0  # each call of picker or Redis

app = typer.Typer(add_completion=False)
index = typer.Typer()
app.add_typer(index, name="index")


@app.command("up")
@fails_in_one_line("up", {BadSettingError: WRONG_USAGE, UpError: FAILURE})
@takes_settings
def up(context: typer.Context, settings: StackSettings) -> None:
    """Start Redis, pods, indexer, picker and a real Envoy on this machine; Ctrl-C ends them all."""
    from operate.local.service import run, simulated_tokenizer

    chosen = {"--config": CONFIG, "--log-level": LOG_LEVEL, "--log-format": LOG_FORMAT}
    shared = {flag: context.meta.get(key) for flag, key in chosen.items()}
    shared_flags = tuple(word for flag, value in shared.items() if value is not None for word in (flag, str(value)))
    asyncio.run(run(completed(settings, simulated_tokenizer=simulated_tokenizer(), shared_flags=shared_flags)))


@app.command("explain")
@takes_settings
def explain(
    login: AdminLogin,
    body: Annotated[str, typer.Argument(metavar="FILE|-", help="Request body as JSON; - reads stdin.")],
    picker: PickerUrl = DEFAULT_PICKER,
    path: Annotated[
        str | None, typer.Option(help="Path of the request. Default: chat or completions, by the body.")
    ] = None,
    objective: Annotated[str | None, typer.Option(help="Value of the header x-gateway-inference-objective.")] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE/NAME[:PORT]",
            help="Pool of the request, if there are several; ports as in `install` are ignored.",
        ),
    ] = None,
    for_host: Annotated[
        str | None, typer.Option(help="Host of the request, if it selects the pool (docs/guides/pools.md).")
    ] = None,
    output: Output = OutputForm.TABLE,
) -> None:
    """Show where a request would go and why, without sending it."""
    from operate.local.explain import ask, doubts, known_there, render

    asked_pool = only_pool(pool)
    if path is not None and not path.startswith("/"):
        raise ConfigError(f"--path {path!r}: a path begins with /, as /v1/completions does")
    content = _read(body)
    decision, answer = asyncio.run(
        ask(
            picker,
            body=content,
            path=path,
            objective=objective,
            timeout_seconds=CALL_SECONDS,
            pool=asked_pool,
            host=for_host,
            login=login,
        )
    )
    if asked_pool is not None and decision.reason == UnknownPoolError.reason:
        raise ConfigError(f"--pool: {decision.message}")
    if output is OutputForm.TABLE:
        render(decision, console=people_console())
    else:
        print_data(msgspec.json.decode(answer), output)  # with fields that this release does not know
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
        typer.Argument(metavar="FILE|-", help="Request body, or a JSON list of token ids; - reads stdin."),
    ],
    model: Annotated[str, typer.Option(help="Model name as clients write it; part of every block key.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the model's tokenizer.json; not needed for token ids.")
    ] = None,
    hash_seed: Annotated[str, typer.Option(help="Seed of the block keys; equal for indexer and picker.")] = "kvmesh",
    output: Output = OutputForm.TABLE,
) -> None:
    """Show the cached prefix of a prompt at each endpoint."""
    from operate.local.index_lookup import look_up, read_token_ids, render

    prompts = read_token_ids(_read(prompt), model=model, tokenizer=tokenizer)
    report = asyncio.run(look_up(access.url, prompts, model=model, hash_seed=hash_seed, timeout_seconds=CALL_SECONDS))
    if output is OutputForm.TABLE:
        render(report, console=people_console())
    else:
        print_data(report, output)


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error

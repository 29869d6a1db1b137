"""The picker's subcommands: `extproc` (the role), `up` (the whole mesh on one machine), `explain`."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from extproc.errors import ConfigError
from extproc.local.command import up
from extproc.policy.values import Steering, Strategy
from kvmesh.admin.admin_options import with_admin_access, with_admin_login
from kvmesh.redis.options import with_redis

if TYPE_CHECKING:
    from kvmesh.admin.admin_access import AdminAccess
    from kvmesh.admin.admin_login import AdminLogin
    from kvmesh.redis.address import RedisAccess

app = typer.Typer(add_completion=False)
app.command("up")(up)


@app.command("extproc")
@with_redis
@with_admin_access
def run_picker(
    access: "RedisAccess",
    admin: "AdminAccess",
    endpoints: Annotated[
        str | None,
        typer.Option(
            help="vLLM pods as IP:PORT,IP:PORT,… (IPv6 as [::1]:8000). Needed without --kubernetes and --policies."
        ),
    ] = None,
    kubernetes: Annotated[
        bool,
        typer.Option(help="Follow the pods, pools and policies of the cluster (KUBECONFIG, or the pod's own account)."),
    ] = False,
    policies: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Follow the same documents in a folder of YAML and JSON files instead: Pods, Services, "
            "InferencePools, InferencePolicies (docs/pools.md).",
        ),
    ] = None,
    root_namespace: Annotated[
        str, typer.Option(help="Namespace whose policies without targets are for the whole mesh.")
    ] = "istio-system",
    namespaces: Annotated[
        str | None, typer.Option(help="Comma-separated namespaces to follow, with --kubernetes. Default: all.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Served model name that --tokenizer belongs to.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the model's tokenizer.json and chat template. Without: no prefix routing."),
    ] = None,
    tokenizers: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="With --kubernetes or --policies: folder with a tokenizer folder for each model, by its name, for "
            "models that no policy, flag or annotation declares: they are learned from the pods.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on, for Envoy and for the admin pages.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="Port for Envoy: ext_proc and gRPC health.")] = 9002,
    admin_port: Annotated[int, typer.Option(min=0, max=65535, help="Port for health, metrics, state, explain.")] = 9090,
    known_models: Annotated[
        str | None,
        typer.Option(help="Comma-separated model names; any other is answered 404. Default: accept all."),
    ] = None,
    hash_seed: Annotated[str, typer.Option(help="Seed of the block keys; the same for indexer and picker.")] = "kvmesh",
    index_timeout_ms: Annotated[
        float, typer.Option(min=0.1, help="Milliseconds to wait for the index before picking on load alone.")
    ] = 20,
    scrape_interval_ms: Annotated[
        float,
        typer.Option(min=10, help="Milliseconds between two scrapes of a pod's metrics (±20 % jitter)."),
    ] = 200,
    scrape_timeout_ms: Annotated[float, typer.Option(min=10, help="Milliseconds until a scrape is given up.")] = 1000,
    stale_after_ms: Annotated[
        float | None,
        typer.Option(
            min=10, help="Milliseconds after which a pod's last report counts as unknown load. Default: 2000."
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of the largest request body; more is answered 413.")
    ] = 16 << 20,
    steering: Annotated[
        Steering,
        typer.Option(help="override-host: a list that retries walk; original-dst: exactly one address."),
    ] = Steering.OVERRIDE_HOST,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON",
            help="The policy of all pools (docs/policy.md): an InferencePolicy or its `spec` alone, as a YAML or JSON "
            "file, or the mapping itself. Default: strategy kv-aware.",
        ),
    ] = None,
    strategy: Annotated[
        Strategy | None, typer.Option(help="Preset of the weights. Goes before --policy. Default: kv-aware.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Scorers and their weights, as prefix=3,queue-depth=2; those left out count 0. Goes before --policy "
            "and --strategy."
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON",
            help="The policy's section `models` by itself (docs/models.md): a YAML or JSON file, or the mapping. Goes "
            "before --policy.",
        ),
    ] = None,
    priorities: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON",
            help="The policy's section `priorities` by itself (docs/priorities.md): classes, rules, tenants. Goes "
            "before --policy. Default: classes critical, standard (for all requests) and sheddable.",
        ),
    ] = None,
    overload: Annotated[
        bool | None,
        typer.Option(
            "--overload/--no-overload",
            help="Hold requests back while the pods are full, and refuse those that may be refused. Default: on.",
        ),
    ] = None,
    trust_objective: Annotated[
        bool | None,
        typer.Option(
            "--trust-objective/--no-trust-objective",
            help="Let x-gateway-inference-objective raise a request's class; it may always lower it. Default: off.",
        ),
    ] = None,
    cordoned: Annotated[
        str | None,
        typer.Option(metavar="IP:PORT,…", help="Endpoints that get no new requests."),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="IP:PORT=ROLE,…",
            help="Roles of endpoints: both (the default), prefill or decode; prefill takes no client's request.",
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds to go on serving, as not ready, after being told to stop.")
    ] = 5,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            help="OTLP/HTTP address for traces (JSON), like http://127.0.0.1:4318/v1/traces. Default: no traces."
        ),
    ] = None,
    trace_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of the requests that are traced, with --otlp-endpoint, where no `traceparent` of the client's "
            "decides. A traced one costs as much CPU as a pick.",
        ),
    ] = 0.01,
    access_log: Annotated[
        bool,
        typer.Option(help="Write one JSON line for each request and its outcome to standard output (docs/audit.md)."),
    ] = False,
    access_log_file: Annotated[
        Path | None, typer.Option(help="Write these lines to a file instead; rotated by size.")
    ] = None,
    access_log_stream: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write these lines to a Redis Stream of this name, too (--redis)."),
    ] = None,
    access_log_max_mb: Annotated[float, typer.Option(min=1, help="Megabytes after which the file is rotated.")] = 100,
    access_log_files: Annotated[int, typer.Option(min=1, help="Files that are kept, the current one among them.")] = 10,
    access_log_stream_length: Annotated[
        int, typer.Option(min=1000, help="Records that the stream keeps, about.")
    ] = 100_000,
    audit: Annotated[
        bool,
        typer.Option(help="Chain each record to the one before, so that `kvmesh audit verify` finds any change."),
    ] = False,
    audit_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Key (at least 16 bytes) of the hashes of tenants and of the chain: lines `id:key`, the last one is "
            "used. Default: a random key, for this process only."
        ),
    ] = None,
    share_load: Annotated[
        bool, typer.Option(help="Tell other replicas through Redis what is booked, and hear it from them.")
    ] = True,
    sample_share: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the responses that are read to compare cached tokens as predicted."),
    ] = 0.02,
    token_budget: Annotated[
        int, typer.Option(min=1, help="Tokens of one request that are tokenized; what is beyond is not looked up.")
    ] = 500_000,
    render_timeout_ms: Annotated[
        float,
        typer.Option(
            min=1,
            help="Milliseconds to wait for a pod's tokens where it renders prompts; with media four times as long.",
        ),
    ] = 500,
    read_below_bytes: Annotated[
        int, typer.Option(min=0, help="Responses that are no streams are read, too, up to so many bytes. 0: none.")
    ] = 16384,
    reads_per_second: Annotated[
        float, typer.Option(min=0, help="How many of these are read a second, at most; samples come on top.")
    ] = 5,
) -> None:
    """Run the endpoint picker: Envoy's ext_proc service."""
    from extproc.service import serve
    from extproc.settings.config import (
        PickerSettings,
        parse_endpoints,
        parse_names,
        parse_roles,
        parse_weights,
        read_models,
        read_policy,
        read_policy_fields,
    )
    from extproc.settings.observation_settings import MEGABYTE, ObservationSettings

    if endpoints is None and not kubernetes and policies is None:
        raise ConfigError("no pods: give --endpoints, --kubernetes, or --policies with a folder of documents")

    flags = {
        "strategy": strategy,
        "weights": parse_weights(weights) if weights is not None else None,
        "stale_after_seconds": stale_after_ms / 1000 if stale_after_ms is not None else None,
    }
    settings = PickerSettings(
        host=host,
        grpc_port=grpc_port,
        admin_port=admin_port,
        redis_url=access,
        endpoints=parse_endpoints(endpoints or ""),
        kubernetes=kubernetes,
        policies_folder=policies,
        root_namespace=root_namespace,
        namespaces=parse_names(namespaces),
        policy_fields=read_policy_fields(
            policy, flags, priorities=priorities, overload=overload, trust_objective=trust_objective, models=models
        ),
        model=model,
        tokenizer_folder=tokenizer,
        tokenizer_folders=tokenizers,
        hash_seed=hash_seed,
        known_models=parse_names(known_models),
        steering=steering,
        index_timeout_seconds=index_timeout_ms / 1000,
        scrape_interval_seconds=scrape_interval_ms / 1000,
        scrape_timeout_seconds=scrape_timeout_ms / 1000,
        max_body_bytes=max_body_bytes,
        drain_seconds=drain_seconds,
        otlp_endpoint=otlp_endpoint,
        policy=replace(
            read_policy(policy, flags, priorities=priorities, overload=overload, trust_objective=trust_objective),
            cordoned=parse_names(cordoned),
            roles=parse_roles(roles or ""),
        ),
        models=read_models(models, policy=policy),
        shares_load=share_load,
        sample_share=sample_share,
        read_below_bytes=read_below_bytes,
        reads_per_second=reads_per_second,
        token_budget=token_budget,
        render_timeout_seconds=render_timeout_ms / 1000,
        admin_access=admin,
        observation=ObservationSettings(
            access_log=access_log,
            access_log_file=access_log_file,
            access_log_stream=access_log_stream,
            access_log_max_bytes=int(access_log_max_mb * MEGABYTE),
            access_log_files=access_log_files,
            access_log_stream_length=access_log_stream_length,
            audit=audit,
            audit_key_file=audit_key_file,
            trace_share=trace_share,
        ),
    )
    _run(lambda stop: serve(settings, stop=stop))


@app.command("explain")
@with_admin_login
def explain(
    login: "AdminLogin",
    body: Annotated[str, typer.Argument(metavar="FILE|-", help="File with a request body as JSON, or - for stdin.")],
    url: Annotated[str, typer.Option(help="The picker's admin address.")] = "http://127.0.0.1:9090",
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
        str | None, typer.Option(help="Host that the request is for, where it tells the pool (docs/pools.md).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the picker's JSON as it is.")] = False,
    timeout_ms: Annotated[float, typer.Option(min=1, help="Milliseconds to wait for the picker.")] = 5000,
) -> None:
    """Show where a request would go and why, without sending it."""
    from extproc.local.explain import ask, render
    from extproc.pools.pool_names import only_pool

    try:
        asked_pool = only_pool(pool)
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from error
    try:
        content = sys.stdin.buffer.read() if body == "-" else Path(body).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {body}: {error.strerror}") from error
    answer = asyncio.run(
        ask(
            url,
            body=content,
            path=path,
            objective=objective,
            timeout_seconds=timeout_ms / 1000,
            pool=asked_pool,
            host=for_host,
            login=login,
        )
    )
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        render(answer)
    if answer["endpoint"] is None:
        raise typer.Exit(1)


def _run(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a role until SIGINT or SIGTERM."""
    import uvloop

    async def until_told() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve(stop)

    uvloop.run(until_told())

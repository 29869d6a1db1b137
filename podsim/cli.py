"""The command `sim`: simulated vLLM pods on their own. The `kvmesh` command loads `app` from here."""

from pathlib import Path
from typing import Annotated

import typer

from podsim.core.link import LinkSettings
from podsim.core.scheduler import EngineSettings
from podsim.errors import PodsimError, PortInUseError, SettingsError
from podsim.wire.kv_events import EventGeneration
from podsim.wire.kv_transfer import parse_kv_transfer_config

LARGEST_PORT = 65535

app = typer.Typer(add_completion=False)


@app.command("sim")
def sim(
    host: Annotated[str, typer.Option(help="Listen address for HTTP and KV events.")] = "127.0.0.1",
    sim_port: Annotated[
        int, typer.Option(min=0, max=LARGEST_PORT, help="Port of the first pod; pod i listens on this + i. 0: any.")
    ] = 8101,
    pods: Annotated[int, typer.Option(min=1, help="Number of pods in this process.")] = 1,
    events_port: Annotated[
        int,
        typer.Option(
            help="Port of the first pod's KV events; pod i publishes on port+2i and replays on port+2i+1. "
            "0: any, see GET /kv_event_sources."
        ),
    ] = 0,
    model: Annotated[str, typer.Option(help="Served model name.")] = "tiny",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Folder with tokenizer.json, tokenizer_config.json and the chat template. Default: a tiny one."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Size of a KV cache block, in tokens.")] = 16,
    kv_blocks: Annotated[
        int, typer.Option(min=2, help="Size of the KV cache, in blocks (one of them stays unused, as in vLLM).")
    ] = 2048,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Maximum of running sequences; more wait.")] = 16,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of an engine step; longer prompts take several.")
    ] = 2048,
    max_num_queued_reqs: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum of waiting and running requests; more get 503. Default: any."),
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Prompt tokens in the queue from which on a pod answers 503. Default: any."),
    ] = None,
    max_model_len: Annotated[int, typer.Option(min=2, help="Maximum of prompt plus answer, in tokens.")] = 16_384,
    prefill_tokens_per_second: Annotated[
        float, typer.Option(min=1.0, help="Prefill speed of one pod, in tokens per second.")
    ] = 8000.0,
    inter_token_ms: Annotated[
        float, typer.Option(min=0.1, help="Minimum time of an engine step, in milliseconds.")
    ] = 8.0,
    stream_us: Annotated[
        float, typer.Option(min=0.0, help="Time that each sequence adds to an engine step, in microseconds.")
    ] = 0.0,
    context_token_us: Annotated[
        float,
        typer.Option(min=0.0, help="Time that each token of context adds to an engine step, in microseconds."),
    ] = 0.0,
    event_generation: Annotated[
        EventGeneration,
        typer.Option(
            help="Wire format of the KV events: g1 vLLM 0.8-0.10.1, g2 0.10.2-0.13, g3 0.14-0.16, g3b 0.17-0.19, "
            "g4 0.20-0.21, g4b 0.22-0.23, g5 0.24 and later."
        ),
    ] = EventGeneration.G5,
    buffer_steps: Annotated[int, typer.Option(min=1, help="Event batches kept for replay.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the generated text.")] = 0,
    enable_scale_out: Annotated[
        bool, typer.Option(help="Answer /render, as vLLM with this flag; else 403, vLLM's default.")
    ] = True,
    tokenize: Annotated[bool, typer.Option(help="Answer /tokenize; else 404.")] = True,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(
            help="vLLM's flag for prefill/decode disaggregation: a JSON object with kv_connector NixlConnector, "
            "kv_role and optionally kv_connector_extra_config with kv_lease_duration in seconds. Default: ignore "
            "kv_transfer_params."
        ),
    ] = None,
    kv_bytes_per_token: Annotated[
        int, typer.Option(min=1, help="Size of a prompt's KV cache, in bytes per token.")
    ] = 131_072,
    kv_link_bytes_per_second: Annotated[
        float, typer.Option(min=1.0, help="Bandwidth of a pod's link, shared by its transfers.")
    ] = 12.5e9,
    kv_link_seconds: Annotated[
        float, typer.Option(min=0.0, help="Fixed time of each KV transfer, in seconds.")
    ] = 0.001,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="API key for paths below /v1, /v2, /inference and /cohere, as in vLLM. Repeat for more. "
            "KVMESH_API_KEY hides it from other users of the machine."
        ),
    ] = None,
) -> None:
    """Run simulated vLLM pods: OpenAI API, prefix cache, KV events and metrics as vLLM 0.32, without a model."""
    from podsim import model_folder, pod, publisher, server  # late: other commands do not pay for them

    engine = EngineSettings(
        block_size=block_size,
        total_blocks=kv_blocks,
        max_running=max_num_seqs,
        max_step_tokens=max_num_batched_tokens,
        prefill_tokens_per_second=prefill_tokens_per_second,
        inter_token_seconds=inter_token_ms / 1000,
        stream_seconds=stream_us / 1e6,
        context_token_seconds=context_token_us / 1e6,
    )
    link = LinkSettings(
        bytes_per_token=kv_bytes_per_token, bytes_per_second=kv_link_bytes_per_second, fixed_seconds=kv_link_seconds
    )
    events = publisher.PublisherSettings(
        host=host, port=events_port, generation=event_generation, buffer_steps=buffer_steps
    )
    try:
        settings = pod.PodSettings(
            model=model,
            max_model_len=max_model_len,
            max_queued_requests=max_num_queued_reqs,
            max_queued_tokens=max_num_queued_tokens,
            seed=seed,
            scale_out=enable_scale_out,
            tokenizes=tokenize,
            api_keys=tuple(api_key or ()),
            kv_transfer=None if kv_transfer_config is None else parse_kv_transfer_config(kv_transfer_config),
            kv_link=link,
            engine=engine,
        )
        settings.check()
        if settings.kv_transfer is not None and settings.kv_transfer.engine_id is not None and pods > 1:
            raise SettingsError(f"one engine_id cannot name {pods} pods: leave it out or start them one by one")
        if sim_port + pods - 1 > LARGEST_PORT:
            raise SettingsError(f"sim-port {sim_port} leaves no ports for {pods} pods: lower one of them")
        folder = model_folder.load_model_folder(tokenizer or model_folder.TINY_MODEL)
        server.serve_until_stopped(settings, folder, events, port=sim_port, count=pods)
    except PodsimError as error:
        typer.echo(f"podsim: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, PortInUseError) else 1) from error
